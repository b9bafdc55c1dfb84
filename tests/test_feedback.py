"""Asked, predicted, measured: the arithmetic of the closed loop, by hand."""

from __future__ import annotations

import json

import pytest

from pliant.session.feedback import DWELL, ENOUGH, LEAST, OVER, PAY_BACK, UNDER, Feedback, Round, Turns

ASKED, FULL = 2.0, 4.0


def feedback(predicted: float = 2.0, asked_bytes: float | None = None) -> Feedback:
    out = Feedback()
    out.begin(Round(0, 0, ASKED, predicted, FULL, asked_bytes=asked_bytes, predicted_bytes=1000))
    return out


def test_a_round_shows_its_mean_step_in_shares_of_a_full_one() -> None:
    round = Round(3, 40, ASKED, 1.8, FULL, seconds=20.0, steps=10)
    assert round.measured == 2.0
    assert str(round) == "round 3 from step 40: asked 0.500, predicted 0.450, measured 0.500 of a full step, 10 steps"


def test_a_round_without_a_limit_or_a_full_step_shows_what_it_knows() -> None:
    assert "asked –, predicted 1.5 ms, measured –" in str(Round(0, 0, None, 0.0015, 0.0))


def test_the_first_steps_set_the_ratio_and_later_ones_move_it_half_way() -> None:
    seen = feedback()
    seen.see([3.0] * 10, ASKED)
    assert seen.ratio == 1.5
    seen.see([2.0] * 10, ASKED)
    assert seen.ratio == 1.25


@pytest.mark.parametrize("count", [1, ENOUGH - 1, ENOUGH])
def test_few_steps_say_nothing(count: int) -> None:
    seen = feedback()
    seen.see([3.0] * count, ASKED)
    assert (seen.recent is None) == (count < ENOUGH) == (seen.ratio == 1.0)
    assert seen.rounds[-1].steps == count


def test_of_a_share_the_quicker_steps_count() -> None:
    seconds = [2.0, 2.0, 2.0, 9.0, 9.0, 9.0, 9.0, 9.0]
    share, amount = feedback(), feedback()
    share.see(seconds, ASKED, share=True)
    amount.see(seconds, ASKED)
    assert (share.recent, amount.recent) == (2.0, 9.0)
    assert share.overspent == 0.0 < amount.overspent
    assert share.rounds[-1].seconds == amount.rounds[-1].seconds == sum(seconds)


@pytest.mark.parametrize(
    ("step", "is_off"),
    [
        (ASKED * (1 + OVER * 0.9), False),
        (ASKED * (1 + OVER * 1.1), True),
        (ASKED * (1 - UNDER * 0.9), False),
        (ASKED * (1 - UNDER * 1.1), True),
    ],
)
def test_steps_are_off_outside_of_the_band(step: float, is_off: bool) -> None:
    seen = feedback()
    seen.see([step] * 10, ASKED, owes=False)
    assert seen.is_off(ASKED) == is_off


def test_a_selection_has_its_time_and_each_correction_doubles_it() -> None:
    seen = feedback()
    seen.see([3.0] * (DWELL - 1), ASKED)
    assert not seen.may_correct(ASKED, 0.0, 1000)
    seen.see([3.0], ASKED)
    assert seen.may_correct(ASKED, 0.0, 1000)
    seen.correcting(in_turn=False)
    seen.begin(Round(0, 10, ASKED, 2.0, FULL))  # the same round, corrected
    seen.see([3.0] * DWELL, ASKED)
    assert not seen.may_correct(ASKED, 0.0, 1000)
    seen.see([3.0] * DWELL, ASKED)
    assert seen.may_correct(ASKED, 0.0, 1000)
    seen.begin(Round(1, 40, ASKED, 2.0, FULL))  # another round begins anew
    seen.see([3.0] * DWELL, ASKED)
    assert seen.may_correct(ASKED, 0.0, 1000)


@pytest.mark.parametrize(("step", "needs"), [(2.3, False), (2.5, True), (1.7, True)])
def test_a_correction_by_much_and_one_that_adds_compare_with_full_steps(step: float, needs: bool) -> None:
    seen = feedback()
    seen.see([step] * 10, ASKED, owes=False)
    assert seen.needs_turns(ASKED) == needs


def test_a_correction_must_be_worth_what_it_costs() -> None:
    seen = feedback()
    seen.see([3.0] * DWELL, ASKED, owes=False)
    assert seen.may_correct(ASKED, 9.0, 10) and not seen.may_correct(ASKED, 11.0, 10)


def test_a_later_attempt_to_correct_must_promise_more() -> None:
    seen = feedback()
    seen.correcting(in_turn=False)
    seen.see([3.0] * 2 * DWELL, ASKED, owes=False)
    assert seen.may_correct(ASKED, 4.9, 10) and not seen.may_correct(ASKED, 5.1, 10)


def test_what_was_overspent_is_saved_and_what_was_saved_is_not_spent() -> None:
    seen = feedback()
    seen.see([2.1] * 10, ASKED)
    assert seen.overspent == pytest.approx(1.0)
    assert seen.aim(ASKED) == pytest.approx(ASKED - 1.0 / PAY_BACK)
    seen.see([4.0] * 10, ASKED)
    assert seen.aim(ASKED) == LEAST * ASKED
    seen.see([0.5] * 30, ASKED)
    assert seen.overspent == 0.0 and seen.aim(ASKED) == ASKED


def test_what_measuring_and_choosing_take_is_saved_too_and_counts_once() -> None:
    seen = feedback()
    seen.see([2.0] * 10, ASKED, aside=3.0)
    assert (seen.owed, seen.overspent, seen.recent, seen.rounds[-1].seconds) == (3.0, 0.0, 2.0, 20.0)
    assert seen.aim(ASKED) == pytest.approx(ASKED - 3.0 / PAY_BACK)
    seen.see([2.0] * 10, ASKED, aside=3.0)
    assert seen.owed == 3.0
    seen.see([1.9] * 10, ASKED, aside=3.5)
    assert seen.owed == pytest.approx(2.5)
    seen.see([2.0] * 10, ASKED, owes=False, aside=4.0)
    assert seen.owed == 0.0


def test_full_steps_judge_past_steps_anew_but_not_what_measuring_took() -> None:
    seen = feedback()
    seen.see([2.5] * 10, ASKED, aside=3.0)
    turns = Turns([2.0] * ENOUGH, [4.0] * (ENOUGH + 1))
    seen.reassess(turns, ASKED)
    assert (seen.overspent, seen.owed) == (0.0, 3.0)


def test_what_measuring_took_is_not_owed_under_another_budget() -> None:
    seen = feedback()
    seen.see([], ASKED, aside=3.0)  # a change of the budget reads all steps first, and there may be none
    seen.forget()
    seen.see([2.0] * 10, ASKED, aside=3.0)
    assert seen.owed == 0.0


def test_the_next_plan_is_priced_by_the_ratio() -> None:
    seen = feedback()
    seen.see([2.5] * 10, ASKED, owes=False)
    assert seen.limit(ASKED) == pytest.approx(ASKED / 1.25)


def test_what_is_added_to_a_selection_takes_what_was_predicted_for_it() -> None:
    seen = feedback(predicted=1.8)
    seen.see([1.5] * 10, ASKED, owes=False)
    assert seen.limit(ASKED, near=True) == pytest.approx(1.8 + 0.5)
    assert seen.limit(ASKED) == pytest.approx(ASKED / (1.5 / 1.8)), "a new one may take less as a whole"
    seen.see([2.4] * 10, ASKED, owes=False)
    assert seen.limit(ASKED, near=True) == seen.limit(ASKED) == pytest.approx(ASKED / seen.ratio), "what is left out, too"


def test_steps_are_judged_by_the_full_steps_beside_them() -> None:
    """Other work slows some of them, and the full steps after them alike."""
    seen = feedback()
    seen.see([2.5] * 10, ASKED)
    seen.correcting(in_turn=True)
    slowed = [1.0, 2.0, 1.5, 1.0, 4.0]
    goes_on = [seen.turns.goes_on(100.0 if k == 0 else 4.8 * slowed[k - 1]) for k in range(ENOUGH)]  # the first does not count
    assert all(goes_on) and seen.turns.is_last
    seen.see([2.4 * s for s in slowed], ASKED)
    assert not seen.turns.goes_on(4.8 * slowed[-1])
    assert seen.turns.share == pytest.approx(0.5) and seen.turns.full_seconds == 4.8 * 1.5
    seen.reassess(seen.turns, asked=0.4 * 7.2)
    assert seen.rounds[-1].full == pytest.approx(7.2) and seen.recent == pytest.approx(3.6) and seen.ratio == pytest.approx(1.8)
    assert seen.overspent == pytest.approx((3.6 - 2.88) * 15)


def test_too_few_turns_say_nothing() -> None:
    seen = feedback()
    seen.correcting(in_turn=True)
    assert not seen.turns.goes_on(0.0)  # no full step can be taken
    assert seen.turns.share is None


def test_other_prices_forget_the_ratio() -> None:
    seen = feedback()
    seen.see([2.5] * 10, ASKED)
    seen.predict(2.0, same_prices=True)
    assert seen.ratio == 1.25
    seen.predict(1.0, same_prices=False)
    assert (seen.ratio, seen.recent, seen.rounds[-1].predicted) == (1.0, None, 1.0)


def test_bytes_of_a_selection_are_measured_once_and_again_for_a_larger_batch() -> None:
    seen = feedback(asked_bytes=1200.0)
    assert seen.wants_bytes(8)
    seen.see_bytes(1500, 8)
    assert not seen.wants_bytes(8) and seen.wants_bytes(9)
    assert seen.is_over(1200.0) and seen.bytes_within(1200.0) == 800.0
    seen.forget(bytes=True)
    assert seen.bytes_within(1200.0) == 1200.0


def test_the_mean_is_over_the_steps_of_all_rounds() -> None:
    seen = feedback()
    assert seen.mean is None
    seen.see([1.0] * 10, ASKED)
    seen.begin(Round(1, 10, ASKED, 2.0, FULL))
    seen.see([4.0] * 5, ASKED)
    assert seen.mean == pytest.approx(2.0)


def test_feedback_goes_on_from_its_state() -> None:
    seen = feedback(asked_bytes=1200.0)
    seen.see([3.0] * 10, ASKED)
    seen.see_bytes(1500, 8)
    seen.correcting(in_turn=True)
    seen.turns.goes_on(4.0)
    assert Feedback.of(json.loads(json.dumps(seen.state()))) == seen
