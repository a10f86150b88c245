"""What is said while a run goes on: each thing once, and again when there is ten times more of it."""

from asyncrl.notices import Notices, dropped, skipped


def status(**counts: int) -> dict:
    return {
        "ledger": {"ledger/dropped": 1.0, **{f"dropped/{reason}": n for reason, n in counts.items()}},
        "why_dropped": {"too_long": "an episode of 70 tokens exceeds training.seq_len 64"},
    }


def test_failures_are_said_once_and_again_when_they_have_grown_tenfold() -> None:
    notices = Notices()
    said = [notices.of_status(status(too_long=n)) for n in (1, 2, 9, 10, 99, 100)]
    assert [len(lines) for lines in said] == [1, 0, 0, 1, 0, 1]
    assert said[0] == ["1 group was dropped, too_long; the last: an episode of 70 tokens exceeds training.seq_len 64"]


def test_groups_that_are_dropped_in_the_ordinary_way_are_not_said() -> None:
    notices = Notices()
    assert notices.of_status(status(filtered=400, expired=3, stale=2, aborted=1)) == []
    assert notices.of_status({}) == []
    assert list(dropped(status(filtered=5, too_long=7)["ledger"])) == ["too_long", "filtered"]


def test_a_run_that_filters_nearly_everything_hears_once_what_may_be_done() -> None:
    notices = Notices()
    ledger = {"ledger/started": 600.0, "dropped/filtered": 479.0}
    assert notices.of_status({"ledger": ledger}) == []
    for filtered, started, lines in ((520.0, 700.0, 0), (570.0, 700.0, 1), (2000.0, 2200.0, 0), (5700.0, 6000.0, 1)):
        said = notices.of_status({"ledger": {"ledger/started": started, "dropped/filtered": filtered}})
        assert len(said) == lines
        assert all(f"{filtered:.0f} of {started:.0f} groups" in line for line in said)


def test_the_advice_on_filtered_groups_goes_by_what_they_earned_and_names_keys() -> None:
    ledger = {"ledger/started": 700.0, "dropped/filtered": 690.0}
    for full_marks, reward, parts in (
        (1.0, 0.0031, ("0.0031 on average", "--training.batch-size 8 --algo.n-samples 32", "easier prompts")),
        (1.0, 0.98, ("0.98 on average", "too easy", "--curriculum.rest 2")),
        (10.0, 0.98, ("--training.batch-size 8 --algo.n-samples 32",)),
        (1.0, None, ("the same reward; try", "--training.batch-size 8 --algo.n-samples 32")),
    ):
        notices = Notices(full_marks=full_marks, n_samples=8, batch_size=32)
        (line,) = notices.of_status({"ledger": ledger, "dropped_reward": reward})
        assert all(part in line for part in parts)
    (line,) = Notices(n_samples=16, batch_size=2).of_status({"ledger": ledger})
    assert "--training.batch-size 1 --algo.n-samples 64" in line


def test_a_step_that_changed_nothing_is_said_unless_there_was_nothing_to_train_on() -> None:
    rows = [{"step": step, "optimizer/skipped": 1.0, "tokens/trained": tokens} for step, tokens in ((1, 0.0), (2, 5.0))]
    assert [skipped(row) for row in rows] == [0.0, 1.0]
    assert Notices().of_rows(rows) == ["step 2 changed nothing: its loss or a gradient was not finite"]
