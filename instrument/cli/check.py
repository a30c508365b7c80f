"""`instrument check`: say whether traces can be believed."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from instrument.base.printable import printable
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
    found, ranks = [], []
    for capture in readable_captures(arguments.paths):
        found.append((capture.name, claims(capture)))
        ranks.append(seen(capture))
    of_job = job_claims(ranks) if len(ranks) > 1 else []
    holds = all(
        each.holds(required) is not False for _, of in [*found, ("", of_job)] for each in of
    )
    status = 0 if holds else 1
    if arguments.json:
        content = {
            "required": required,
            "holds": holds,
            "captures": [
                {"capture": name, "claims": [_plain(each, required) for each in of]}
                for name, of in found
            ],
            "job": [_plain(each, required) for each in of_job],
        }
        return Result(Written(json_text(content)), status)
    parts = [*found, *([("all traces together", of_job)] if of_job else [])]
    texts = [
        "\n".join([printable(name), *(_line(each, required) for each in of)]) for name, of in parts
    ]
    return Result(Written("\n\n".join(texts)), status)


def _plain(claim: Claim, required: float) -> dict[str, Any]:
    values = claim._asdict() | {"holds": claim.holds(required)}
    del values["is_unmet"]
    return values


def _line(claim: Claim, required: float) -> str:
    holds = claim.holds(required)
    # not rounded up, so that 98.996 % is not 99
    figure = "" if claim.share is None else f"{math.floor(claim.share * 10_000) / 100:.2f} %"
    follows = f", so {claim.means}" if holds is False else ""
    why = f": {claim.why}{follows}" if claim.why or follows else ""
    return f"  {_MARKS[holds]:8}{figure:>8}  {claim.claim}{why}"
