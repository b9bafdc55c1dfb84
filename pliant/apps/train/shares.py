"""What a step of a run takes, as a share of a full step, and in words beside what was asked."""

from __future__ import annotations

from pliant.session.session import Session


def mean_step(session: Session) -> float | None:
    """Mean seconds of a step in the run so far. A budget is compared with this mean, because selections may alternate."""
    rounds = [one for one in session.rounds if one.steps]
    steps = sum(one.steps for one in rounds)
    return sum(one.seconds for one in rounds) / steps if steps else session.measured_seconds


def share_of_full(session: Session, seconds: float | None) -> float | None:
    """Share of a plain full step; None where the full step was not timed."""
    full = session.profile.full.seconds if session.units else 0.0
    return seconds / full if seconds is not None and full else None


def budget(session: Session) -> str:
    """What was asked of a step and what was measured, in words."""
    if not session.units:
        return ""
    asked, full, mean, out = session.selection.asked, session.profile.full, mean_step(session), []
    share = share_of_full(session, mean)
    if "seconds" in asked:
        out.append(f"time asked {asked['seconds'] / full.seconds:.2f}" + (f", measured {share:.2f}" if share else ""))
    elif share:
        out.append(f"time {share:.2f} of a full step")
    elif mean:
        out.append(f"{mean * 1e3:.3g} ms per step")
    if "bytes" in asked:
        measured = session.rounds[-1].measured_bytes
        out.append(f"memory asked {asked['bytes'] / 1e6:.4g} MB" + (f", measured {measured / 1e6:.4g} MB" if measured else ""))
    if "macs" in asked:
        out.append(f"macs asked {asked['macs'] / full.macs:.2f}, chosen {session.selection.share('macs'):.2f}")
    return " · ".join(out)
