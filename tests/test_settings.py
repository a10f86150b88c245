"""Settings: what is read, what is overridden, and what is refused: in one line that names the key and the remedy."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl import Algorithm, Env, Prompt, keys, register_algo, register_env
from asyncrl.algorithm import Needs
from asyncrl.config import Config
from asyncrl.settings import check, load, load_run, resolve, save


@register_algo("settings_algo")
class Algo(Algorithm):
    clip_high: float = 0.28
    label: str = ""


@register_algo("settings_proximal")
class Proximal(Algorithm):
    def needs(self) -> Needs:
        return Needs(proximal=True)


@register_env("settings_env")
class Task(Env):
    num_digits: int = 5

    def prompts(self, start=0):
        for index in itertools.count(start):
            yield Prompt(id=index, prompt="?")


@register_env("settings_unfinished")
class Unfinished(Env):
    pass


BASE = {"algo.name": "settings_algo", "env.name": "settings_env"}


def settled(**overrides):
    run = resolve(load(None, {**BASE, **{k.replace("__", "."): v for k, v in overrides.items()}}))
    check(run)
    return run


def refusal(**overrides) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        settled(**overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_unknown_key_names_its_path_and_the_nearest_one():
    assert refusal(training__learnin_rate=1) == (
        "unknown key 'training.learnin_rate'; did you mean 'training.learning_rate'?"
    )
    assert "training.lora.alpha" in refusal(training__lora__alhpa=1)
    assert "algo.clip_high" in refusal(algo__clip_hihg=1)
    assert "env.num_digits" in refusal(env__num_digit=1)
    assert "'seed'" in refusal(sede=1)


def test_unknown_algorithm_suggests_the_nearest_name():
    assert "did you mean 'settings_algo'?" in refusal(algo__name="settings_alog")


def test_wrong_type_names_the_path_and_the_value():
    assert refusal(training__steps="many") == "training.steps: expected int, got 'many'"
    assert "window | fifo" in refusal(replay__order="windw")
    assert refusal(eval__every="-1") == "eval.every: expected int >= 0, got '-1'"


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        ({"replay__reuse": 4}, "raise replay.target_lag to 3"),
        ({"training__sync_interval": 4}, "raise replay.target_lag to 3"),
        ({"replay__max_lag": 1}, "at least 2"),
        ({"replay__capacity_groups": 31}, "at least 32"),
        ({"training__minibatches": 5}, "choose a divisor"),
        ({"algo__temperature": 0}, "must be positive"),
        ({"generation__max_tokens": 64}, "raise the second"),
        ({"generation__top_p": 0.9}, "algo.temperature alone"),
        ({"generation__vllm__logprobs_mode": "raw_logprobs"}, "remove the key"),
        ({"parallelism__pipeline_parallel_degree": 2}, "shard instead"),
        ({"parallelism__tensor_parallel_degree": 3}, "data_parallel_shard_degree"),
        ({"replay__bind": "tcp://0.0.0.0:5555"}, "asyncrl keys new"),
        ({"metrics__trackers": ["tensorbord"]}, "known: console"),
        ({"services__generator__num_replicas": 0}, "at least 1"),
        ({"services__ref_model__num_replicas": 33}, "more than 32"),
        ({"services__ref_model__procs": 2}, "holds the whole model; remove the key"),
        ({"services__ref_model__bind": "tcp://0.0.0.0:*"}, "asyncrl keys new"),
        ({"services__ref_model__with_gpus": True, "services__trainer__with_gpus": False}, "remove one of them"),
        ({"algo__name": "settings_proximal"}, "minibatches to 2"),
        ({"env__name": "settings_unfinished"}, "must define prompts"),
    ],
)
def test_what_cannot_work_is_refused_with_the_remedy(overrides, remedy):
    assert remedy in refusal(**overrides)


def test_the_reference_can_be_kept_in_host_memory_by_that_key_alone():
    assert settled(services__ref_model__with_gpus="false").config.services.ref_model.num_replicas == 0


def test_reference_processes_may_have_gpus_that_the_trainer_has_not():
    keys = {"services__ref_model__num_replicas": 2, "services__ref_model__with_gpus": True}
    check(settled(**keys, services__trainer__with_gpus=False))


def test_synchronous_rl_is_the_integer_zero():
    run = settled(replay__target_lag="0")
    assert (run.config.replay.target_lag, run.config.replay.max_lag) == (0, 0)


def test_zero_is_a_value_and_not_unset():
    run = settled(training__learning_rate="0", training__warmup_sft_steps="0", seed="0", replay__max_lag="2")
    assert run.config.training.learning_rate == 0.0
    assert run.config.training.warmup_sft_steps == 0


def test_text_becomes_what_the_field_declares():
    run = settled(
        training__learning_rate="1e-6",
        algo__label="a=b=c",
        metrics__trackers="console,wandb",
        training__adam_betas="0.9,0.99",
        training__compile="true",
        generation__thinking="none",
        env__num_digits="7",
    )
    assert run.config.training.learning_rate == 1e-6
    assert run.algo.label == "a=b=c"
    assert run.config.metrics.trackers == ["console", "wandb"]
    assert run.config.training.adam_betas == (0.9, 0.99)
    assert run.config.training.compile is True
    assert run.config.generation.thinking is None
    assert run.env.num_digits == 7


def test_files_in_yaml_and_toml_mean_the_same(tmp_path):
    yaml, toml = tmp_path / "a.yaml", tmp_path / "a.toml"
    yaml.write_text("algo: settings_algo\nenv: {name: settings_env, num_digits: 3}\ntraining: {learning_rate: 1e-5}\n")
    toml.write_text(
        'algo = "settings_algo"\nenv = {name = "settings_env", num_digits = 3}\n[training]\nlearning_rate=1e-5'
    )
    assert load(yaml) == load(toml)


def test_overrides_beat_the_file_and_the_file_beats_the_demo(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("training: {steps: 7, batch_size: 16}\n")
    config = load(file, {"training.batch-size": "8"})
    assert (config.training.steps, config.training.batch_size) == (7, 8)
    assert load(file, {"model.path": "some/folder"}).services.generator.num_replicas == 1


@pytest.mark.parametrize("text", ["[1, 2]", "training: 3", "a: b: c", "algo: [dapo]", "nonsense: 1"])
def test_a_file_that_is_no_configuration_is_refused_in_one_line(tmp_path, text):
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=r".") as caught:
        load(file)
    assert "\n" not in str(caught.value)


def test_a_run_read_back_equals_the_run_saved(tmp_path):
    run = settled(run_dir=str(tmp_path), env__num_digits=3, seed=5, algo__label="x: y")
    save(run)
    again = load_run(tmp_path)
    assert again.config == run.config
    assert again.algo == run.algo
    assert again.env == run.env
    assert again.env.seed == 5


def test_a_folder_without_a_run_says_so(tmp_path):
    with pytest.raises(ValueError, match="is not a run folder"):
        load_run(tmp_path)


def test_a_new_run_never_takes_the_folder_of_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = settled(name="x")
    save(first)
    second = settled(name="x")
    assert (first.config.run_dir, second.config.run_dir) == ("runs/x", "runs/x-2")


@given(st.dictionaries(st.sampled_from(list(keys.paths(Config))), st.text(max_size=8), max_size=4))
def test_any_text_for_any_key_is_accepted_or_refused_in_one_line(overrides):
    complaint = ""
    try:
        load(None, overrides)
    except ValueError as error:
        complaint = str(error)
    assert "\n" not in complaint


def test_a_key_by_the_name_that_it_has_elsewhere_is_answered_with_ours():
    known = {*keys.paths(Config), *(f"algo.{key}" for key in keys.paths(Algorithm)), "env.reward"}
    assert set(keys.ELSEWHERE.values()) <= known
    for name, ours in (
        ("training.lr", "training.learning_rate"),
        ("lr", "training.learning_rate"),
        ("algo.epsilon_high", "algo.clip_high"),
        ("generation.temperature", "algo.temperature"),
        ("generation.tensor_parallel_size", "services.generator.procs"),
    ):
        with pytest.raises(ValueError, match=rf"^unknown key '{name}'; here it is '{ours}'$"):
            resolve(load(None, {name: "1"}))


@pytest.mark.parametrize("key", ["replay.bind", "weights.bind", "services.ref_model.bind"])
def test_an_address_that_is_none_is_refused_with_what_one_looks_like(key):
    for address in ("foo", "127.0.0.1:5000", "http://127.0.0.1:5000"):
        with pytest.raises(ValueError, match=rf"^{key}: expected tcp://HOST:PORT .* got '{address}'$"):
            check(resolve(load(None, {key: address})))
    check(resolve(load(None, {key: "tcp://127.0.0.1:*"})))
