"""`instrument check`: say whether traces can be believed."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from instrument.base.printable import printable
from instrument.base.prose import wrapped
from instrument.cli.arguments import CAPTURES, path_or_url
from instrument.cli.output import Result, Written
from instrument.read.views.json_text import json_text

if TYPE_CHECKING:
    from instrument.read.views.witness import Claim

HELP = "say whether traces can be believed: what the profiler lost, and which times are wrong"

_MARKS = {True: "holds", False: "broken", None: "unknown"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments and the text of its help."""
    parser.description = (
        "Say whether traces can be believed. Each line is a claim that holds for every sound "
        "trace, the share of the events for which it holds, and what follows for the figures if "
        "it does not. Several traces are also checked as the ranks of a job. The exit status is 1 "
        "if a claim does not hold. A claim that cannot be judged is unknown, and says why."
    )
    add = parser.add_argument
    add("paths", metavar="TRACE", type=path_or_url, nargs="+", help=CAPTURES)
    add(
        "--require",
        metavar="SHARE",
        type=_share,
        default=0.99,
        help="the least share of the events for which a claim must hold (default: %(default)s)",
    )
    add("--json", action="store_true", help="print JSON, with all claims")


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"must be a share from 0 to 1, such as 0.99, not {text}")
    return share


def run(arguments: argparse.Namespace) -> Result:
    """Return the claims as lines or JSON; the exit status is 1 if one of them does not hold."""
    from instrument.cli.paths import readable_captures
    from instrument.read.views.witness import claims, job_claims, seen

    required: float = arguments.require
    found: list[tuple[str, list[Claim]]] = []
    ranks = []
    for capture in readable_captures(arguments.paths):
        found.append((capture.name, claims(capture)))
        ranks.append(seen(capture))
    of_job = job_claims(ranks) if len(ranks) > 1 else []
    every = [*found, *([("all traces together", of_job)] if of_job else [])]
    holds = all(each.holds(required) is not False for _, of in every for each in of)
    if not arguments.json:
        lines = [
            [printable(name), *(line for each in of for line in _lines(each, required))]
            for name, of in every
        ]
        return Result(Written("\n\n".join(map("\n".join, lines))), int(not holds))
    content = {
        "required": required,
        "holds": holds,
        "captures": [{"capture": name, "claims": _plain(of, required)} for name, of in found],
        "job": _plain(of_job, required),
    }
    return Result(Written(json_text(content)), int(not holds))


def _plain(found: list[Claim], required: float) -> list[dict[str, Any]]:
    return [each._asdict() | {"holds": each.holds(required)} for each in found]


def _lines(claim: Claim, required: float) -> list[str]:
    holds = claim.holds(required)
    # not rounded up, so that 98.996 % is not 99
    figure = "" if claim.share is None else f"{math.floor(claim.share * 10_000) / 100:.2f} %"
    follows = f", so {claim.means}" if holds is False else ""
    why = f": {claim.why}{follows}" if claim.why else ""
    return wrapped(f"{claim.claim}{why}", f"  {_MARKS[holds]:8}{figure:>8}  ")
