"""The command line: what it accepts, what it refuses in one line, and how little it imports to do so."""

import os
import subprocess
import sys

import pytest
import yaml

from asyncrl.arguments import parse
from asyncrl.cli import COMMANDS, main
from asyncrl.settings import load, resolve, resume, save


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(list(argv))
    out = capsys.readouterr()
    return code, out.out, out.err


def test_misspelt_algorithm_is_one_line_with_a_suggestion(capsys):
    code, out, err = run(capsys, "train", "--algo", "dappo")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "did you mean 'dapo'?" in err


def test_misspelt_key_is_one_line_naming_the_nearest(capsys):
    code, _, err = run(capsys, "train", "--algo", "dapo", "--training.learnin_rate", "1")
    assert code == 2
    assert err == "asyncrl: error: unknown key 'training.learnin_rate'; did you mean 'training.learning_rate'?\n"


def test_a_key_that_the_algorithm_does_not_use_is_refused(capsys):
    code, _, err = run(capsys, "train", "--algo", "reinforce", "--algo.clip-high", "0.3", "--dry-run")
    assert code == 2
    assert "clip_high" in err


def test_help_and_what_is_missing_are_heard_anywhere_in_the_line(capsys):
    assert run(capsys, "train", "--algo", "dapo", "-h")[1] == run(capsys, "train", "--algo", "dapo", "--help")[1]
    code, _, err = run(capsys, "envs", "check")
    assert (code, err.count("\n")) == (2, 1)
    assert "envs check takes one environment" in err


@pytest.mark.parametrize("argv", [["trian"], ["plot"], ["plot", "/nowhere"], ["train", "stray"], ["train", "--config"]])
def test_bad_input_is_exit_code_2_and_one_line(capsys, argv):
    code, _, err = run(capsys, *argv)
    assert (code, err.count("\n")) == (2, 1)


def test_dry_run_prints_a_configuration_that_reads_back_equal(capsys, tmp_path):
    _, first, _ = run(capsys, "train", "--algo", "grpo", "--replay.max-lag", "7", "--dry-run", "--run-dir", "r")
    assert yaml.safe_load(first)["replay"]["max_lag"] == 7
    file = tmp_path / "again.yaml"
    file.write_text(first)
    _, second, _ = run(capsys, "train", "--config", str(file), "--dry-run")
    assert second == first


def test_a_folder_that_holds_a_run_is_not_written_over(capsys, tmp_path):
    (tmp_path / "config.yaml").write_text("name: earlier\n")
    code, _, err = run(capsys, "train", "--run-dir", str(tmp_path))
    assert (code, err.count("\n")) == (2, 1)
    assert f"--resume {tmp_path} continues it" in err


def test_resume_auto_takes_the_run_that_was_launched_last_with_its_settings(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, "train", "--resume", "auto", "--dry-run")
    assert (code, err) == (2, "asyncrl: error: --resume auto: there is no run under runs/\n")
    for age, name in ((20, "second"), (30, "first"), (10, "latest"), (40, "oldest")):
        _, config, _ = run(capsys, "train", "--algo", "grpo", "--seed", str(age), "--dry-run")
        path = tmp_path / "runs" / name / "config.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(config)
        os.utime(path, (1e9 - age, 1e9 - age))
    code, out, _ = run(
        capsys, "train", "--resume", "auto", "--services.trainer.procs", "2", "--services.generator.num-replicas", "3",
        "--dry-run",
    )  # fmt: skip
    config = yaml.safe_load(out)
    assert (code, config["run_dir"], config["algo"]["name"], config["seed"]) == (0, "runs/latest", "grpo", 10)
    assert (config["services"]["trainer"]["procs"], config["services"]["generator"]["num_replicas"]) == (2, 3)
    code, _, err = run(capsys, "train", "--resume", "runs/none")
    assert (code, err.count("\n")) == (2, 1)
    assert "runs/none is not a run folder" in err


def test_dashes_underscores_and_equals_signs_mean_the_same():
    forms = [
        ["train", "--replay.max-lag", "7", "--run-dir", "r"],
        ["train", "--replay.max_lag=7", "--run_dir=r"],
    ]
    assert parse(forms[0]) == parse(forms[1])
    assert parse(["train", "--algo.label", "a=b=c"]).overrides == {"algo.label": "a=b=c"}
    assert parse(["train", "--algo.label=a=b"]).overrides == {"algo.label": "a=b"}
    assert parse(["train", "--eval.every", "-1"]).overrides == {"eval.every": "-1"}


def test_lists_flags_and_imports():
    args = parse(
        ["train", "--metrics.trackers", "jsonl", "wandb", "--training.compile", "--import", "a", "--import", "b"]
    )
    assert args.overrides == {
        "metrics.trackers": ["jsonl", "wandb"],
        "training.compile": "true",
        "imports": ["a", "b"],
    }


def test_help_of_train_shows_the_keys_of_the_chosen_algorithm(capsys):
    code, out, _ = run(capsys, "train", "--algo", "gspo", "--help")
    assert code == 0
    for text in ("--algo.clip-high", "--env.digits", "--replay.target-lag", "--training.lora.rank", "window | fifo"):
        assert text in out


def test_every_key_has_a_help_text(capsys):
    _, out, _ = run(capsys, "train", "--help")
    entries = [line for line in out.splitlines() if line.startswith("  --") and "(default" in line]
    after = dict(zip(out.splitlines(), out.splitlines()[1:], strict=False))
    assert len(entries) > 100
    assert [e for e in entries if not after[e].startswith("      ")] == []


def test_algorithms_and_environments_have_a_line_and_a_page_each(capsys):
    for command, name in (("algos", "dapo"), ("envs", "sort_digits")):
        _, table, _ = run(capsys, command)
        assert f"\n{name} " in table
        _, page, _ = run(capsys, command, name)
        assert page.startswith(f"{name}: ")


def test_an_environment_is_checked_against_its_own_answers(capsys):
    code, out, _ = run(capsys, "envs", "check", "sort_digits", "--env.digits", "3")
    assert (code, out.splitlines()[-1]) == (0, "sort_digits works")


def test_a_users_own_algorithm_and_environment_come_in_by_import(capsys, tmp_path):
    module = tmp_path / "mine.py"
    module.write_text(
        "from asyncrl import Env, Prompt, register_env\n"
        "@register_env('mine')\n"
        "class Mine(Env):\n"
        '    """My own."""\n'
        "    size: int = 3\n"
        '    """How large."""\n'
        "    def prompts(self, start=0):\n"
        "        yield Prompt(id=start, prompt='?')\n"
    )
    argv = ["train", "--import", str(module), "--env", "mine", "--env.size", "4", "--dry-run"]
    code, out, _ = run(capsys, *argv)
    assert code == 0
    assert yaml.safe_load(out)["env"] == {"name": "mine", "size": 4, "seed": 0}
    _, out, _ = run(capsys, "train", "--import", str(module), "--env", "mine", "--help")
    assert "--env.size" in out


def test_a_module_in_the_working_directory_is_found_by_the_installed_command(tmp_path):
    (tmp_path / "here_env.py").write_text(
        "from asyncrl.envs.sort_digits import SortDigits\nclass Here(SortDigits):\n    pass\n"
    )
    code = "import sys; sys.path.pop(0); from asyncrl.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "train", "--env", "here_env:Here", "--dry-run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


HEAVY = {"torch", "vllm", "transformers", "matplotlib", "datasets", "wandb", "zmq"}
LIGHT = [
    ["--help"],
    ["train", "--help"],
    ["algos"],
    ["envs", "sort_digits"],
    ["train", "--algo", "dappo"],
    ["train", "--dry-run"],
]


@pytest.mark.parametrize("argv", LIGHT, ids=" ".join)
def test_light_commands_import_nothing_heavy(argv):
    code = f"import sys\nfrom asyncrl.cli import main\nmain({argv})\nprint(sorted(set(sys.modules) & {HEAVY}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_every_command_is_on_the_help_page(capsys):
    _, out, _ = run(capsys, "--help")
    assert [c for c in COMMANDS if f"asyncrl {c}" not in out] == []
    assert [c for c in ("sft", "eval", "keys") if f"asyncrl {c}" in out and c not in COMMANDS] == []


@pytest.mark.parametrize("argv", [[name, "--help"] for name in COMMANDS] + [["envs", "check", "--help"], ["--version"]])
def test_every_command_has_a_page_and_exit_code_0(capsys, argv):
    code, out, err = run(capsys, *argv)
    assert (code, err) == (0, "")
    assert out.startswith("asyncrl 0." if argv == ["--version"] else f"usage: asyncrl {argv[0]}")


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("--seed", "5", "seed 0"),
        ("--algo.n-samples", "4", "algo.n_samples 8"),
        ("--env.digits", "7", "env.digits 5"),
        ("--env", "token_reversal", "env.name 'sort_digits'"),
        ("--training.lora.rank", "4", "training.lora.rank 0"),
    ],
)
def test_a_resume_refuses_what_the_buffer_and_the_data_do_not_survive(capsys, tmp_path, key, value, named):
    save(resolve(load(None, {"run_dir": str(tmp_path)})))
    before = (tmp_path / "config.yaml").read_text()
    code, _, err = run(capsys, "train", "--resume", str(tmp_path), key, value, "--dry-run")
    assert code == 2
    assert f"--resume {tmp_path} keeps {named}" in err
    assert (tmp_path / "config.yaml").read_text() == before


def test_a_resume_to_fewer_steps_than_are_trained_is_refused(capsys, tmp_path):
    save(resolve(load(None, {"run_dir": str(tmp_path)})))
    for step in (4, 12):
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    code, _, err = run(capsys, "train", "--resume", str(tmp_path), "--training.steps", "11", "--dry-run")
    assert code == 2
    assert "training.steps is 11, and 12 are trained already" in err
    assert run(capsys, "train", "--resume", str(tmp_path), "--training.steps", "12", "--dry-run")[0] == 0


def test_a_resume_with_other_settings_keeps_the_former_ones_beside_them(tmp_path):
    save(resolve(load(None, {"run_dir": str(tmp_path)})))
    first = (tmp_path / "config.yaml").read_text()
    for steps in (7, 8):
        save(resume(str(tmp_path), {"training.steps": steps}))
    assert (tmp_path / "config.000.yaml").read_text() == first
    assert yaml.safe_load((tmp_path / "config.001.yaml").read_text())["training"]["steps"] == 7
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["training"]["steps"] == 8


def test_a_supervised_run_is_resumed_by_nobody_since_that_would_write_over_it(capsys, tmp_path):
    save(resolve(load(None, {"run_dir": str(tmp_path)})))
    rl, supervised = '{"step":1,"version":1,"loss":0.5}', '{"step":1,"version":1,"sft/loss":2.0}'
    for rows, command, said in (
        (supervised, "train", f"start from its model in a new run: --model {tmp_path / 'model'}"),
        (supervised, "sft", "asyncrl sft keeps no checkpoints"),
        (rl, "sft", "asyncrl sft keeps no checkpoints"),
    ):
        (tmp_path / "metrics.jsonl").write_text(f"{rows}\n")
        code, _, err = run(capsys, command, "--resume", str(tmp_path))
        assert (code, err.count("\n")) == (2, 1)
        assert said in err
    (tmp_path / "metrics.jsonl").write_text(f'{{"step":0,"version":0,"sft/loss":1.0}}\n{rl}\n')  # a warm-up is none
    assert run(capsys, "train", "--resume", str(tmp_path), "--dry-run")[0] == 0


def test_demonstrations_that_an_environment_does_not_have_are_asked_for_before_anything_starts(capsys, tmp_path):
    data = tmp_path / "my.jsonl"
    data.write_text('{"question": "1+1=", "answer": "2"}\n')
    argv, warm = ["--dataset.path", str(data), "--dry-run"], ["--training.warmup-sft-steps", "5"]
    for command, more, said in (
        ("sft", ["--env", "gsm8k"], "asyncrl sft trains on an environment's demonstrations, and 'gsm8k' has none"),
        ("train", ["--env", "gsm8k", *warm], "training.warmup_sft_steps is 5, and environment 'gsm8k'"),
        ("train", ["--env", "gsm8k", "--dataset.completion-key", "answer"], "dataset.completion_key has no effect"),
        ("sft", ["--env", "dataset"], "no column completion or messages"),
        ("train", ["--env", "dataset", *warm], "no column completion or messages"),
    ):
        code, _, err = run(capsys, command, *argv, *more)
        assert (code, err.count("\n")) == (2, 1)
        assert said in err
    assert run(capsys, "train", *argv, "--env", "dataset")[0] == 0
    for command, more in (("sft", []), ("train", warm)):
        assert run(capsys, command, *argv, "--env", "dataset", "--dataset.completion-key", "answer", *more)[0] == 0


def test_supervised_training_on_ones_own_data_needs_no_columns_but_those_it_learns_from(capsys, tmp_path):
    data = tmp_path / "my.jsonl"
    data.write_text('{"prompt": "1+1=", "completion": "2"}\n')
    argv = ["--env", "dataset", "--dataset.path", str(data), "--dry-run"]
    assert run(capsys, "sft", *argv)[0] == 0
    code, _, err = run(capsys, "train", *argv)
    assert code == 2
    assert "dataset.prompt_key 'question' is not a column" in err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["doctor", "--foo"], "asyncrl doctor has no option --foo"),
        (["doctor", "--dry-run"], "asyncrl doctor has no option --dry-run"),
        (["plot", "runs/demo", "--config", "x.yaml"], "asyncrl plot has no option --config"),
        (["keys", "new", "k", "--n", "3"], "asyncrl keys has no option --n"),
        (["sft", "--role", "sft"], "asyncrl sft has no option --role"),
        (["eval", "--resume", "runs/demo"], "asyncrl eval has no option --resume"),
        (["eval"], "asyncrl eval needs what it evaluates: a run folder"),
        (["eval", "--env", "countdown", "--n", "4"], "asyncrl eval needs what it evaluates: a run folder"),
        (["eval", "runs/demo", "--name", "x"], "writes to RUN/eval: --name has no effect"),
        (["eval", "runs/demo", "--run-dir", "x"], "writes to RUN/eval: --run-dir has no effect"),
        (["eval", "runs/demo", "--model", "x"], "writes to RUN/eval: --model has no effect"),
        (["eval", "runs/demo", "--config", "x.yaml"], "writes to RUN/eval: --config has no effect"),
    ],
)
def test_what_a_command_would_not_look_at_is_refused_in_one_line(capsys, argv, said):
    code, out, err = run(capsys, *argv)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_files_and_folders_that_cannot_be_used_are_one_line(capsys, tmp_path):
    twice, binary, taken = tmp_path / "twice.yaml", tmp_path / "binary.yaml", tmp_path / "taken"
    twice.write_text("seed: 1\ntraining: {steps: 3}\nseed: 2\n")
    binary.write_bytes(b"\xff\xfe\x00")
    taken.write_text("a file")
    for command in ("train", "eval"):
        code, _, err = run(capsys, command, "--model", "tiny", "--run-dir", "/proc/none")
        assert (code, err.count("\n")) == (2, 1)
        assert "the run folder /proc/none cannot be used" in err
    for argv, said in (
        (["--config", str(twice)], "the key 'seed' appears twice"),
        (["--config", str(binary)], "binary.yaml cannot be read"),
        (["--config", str(tmp_path)], "cannot be read: [Errno 21]"),
        (["--run-dir", str(taken)], f"the run folder {taken} cannot be used"),
    ):
        code, _, err = run(capsys, "train", *argv)
        assert (code, err.count("\n")) == (2, 1)
        assert said in err


def test_a_role_in_a_folder_without_a_run_is_one_line_and_makes_no_folder(capsys, tmp_path):
    code, _, err = run(capsys, "train", "--role", "generator", "--run-dir", str(tmp_path / "mistyped"))
    assert (code, err.count("\n")) == (2, 1)
    assert "holds no config.yaml here" in err
    assert not (tmp_path / "mistyped").exists()


def test_a_misspelt_section_is_answered_with_a_section(capsys):
    for key in ("trainning.steps", "trainings.steps"):
        _, _, err = run(capsys, "train", f"--{key}", "3")
        assert "did you mean 'training'?" in err
