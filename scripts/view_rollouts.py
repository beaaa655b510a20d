"""Shows the rollouts of a run: turns, tokens, rewards and versions, on the terminal or as one HTML page.

    python scripts/view_rollouts.py runs/2026-01-31-tiny_guess                  the newest step
    python scripts/view_rollouts.py RUN --step 12 --failed                      what went wrong in step 12
    python scripts/view_rollouts.py RUN --tokens                                token by token
    python scripts/view_rollouts.py RUN --html rollouts.html                    a page that needs nothing else

On colours: what the policy has sampled is green, the darker the less likely it was; the rest is grey.
"""

import argparse
import html
import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

FILE = "rollouts.jsonl"
CUT_OFF = " [cut off: no more tokens]"
MAIN_AGENT = "main"  # rl.types.MAIN_AGENT, which brings torch and takes seconds to import
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; color: #222; }
h2 { border-top: 1px solid #ccc; padding-top: .8em; font-size: 1.1em; }
.good { color: #167a2c; } .bad { color: #b3261e; }
.turn { border-left: 4px solid #bbb; margin: .5em 0; padding: .1em .8em; white-space: pre-wrap; }
.turn.action { border-color: #2e9d4a; background: #f2faf4; }
.turn .who { color: #777; font-size: .8em; } .turn .reward { float: right; font-weight: 600; }
.row { font: 13px/1.7 ui-monospace, monospace; white-space: pre-wrap; word-break: break-all; background: #fafafa;
  padding: .6em; }
.row span { border-radius: 3px; } .row .seen { color: #888; } .row .cut { color: #b3261e; }
summary { cursor: pointer; color: #555; } table { border-collapse: collapse; } td { padding: 0 .8em 0 0; color: #555; }
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder, or a rollouts.jsonl")
    parser.add_argument("--step", type=int, help="rollouts of this step [the newest; with --html all]")
    parser.add_argument("--position", type=int, help="rollouts of this group")
    parser.add_argument("--failed", action="store_true", help="only episodes that failed")
    parser.add_argument("--limit", type=int, default=20, help="most rollouts that are shown [%(default)s]")
    parser.add_argument("--tokens", action="store_true", help="token by token, on the terminal")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page instead")
    return parser


def load(path: Path) -> list[dict[str, Any]]:
    """All rollouts of a run. Raises OSError or ValueError, naming the file and line."""
    file = path / FILE if path.is_dir() else path
    rollouts = []
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                rollouts.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"{file}:{number}: not JSON: {error}") from error
    return rollouts


def choose(rollouts: list[dict[str, Any]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Those that are asked for, the newest last."""
    step = args.step
    if step is None and args.html is None and rollouts:
        step = max(r["step"] for r in rollouts)
    found = [
        r
        for r in rollouts
        if (step is None or r["step"] == step)
        and (args.position is None or r["position"] == args.position)
        and (not args.failed or r["status"] != "ok")
    ]
    return found[-args.limit :]


def headline(rollout: dict[str, Any]) -> str:
    """One line: where it is from, how it ended, what it earned."""
    reward = "no reward" if rollout["reward"] is None else f"reward {rollout['reward']:g}"
    ended = rollout["status"] if rollout["status"] != "ok" else "truncated" if rollout["truncated"] else "ended"
    turns = rollout.get("metrics", {}).get("turns")
    parts = [
        f"step {rollout['step']}",
        f"group {rollout['position']}",
        ended,
        reward,
        f"{rollout['num_tokens']} tokens",
    ]
    versions = sorted({v for row in rollout.get("rows", []) for v in row["versions"] if v >= 0})
    parts += [f"{turns:g} turn{'s' * (turns != 1)}"] if turns else []
    parts += (
        [f"versions {versions[0]}-{versions[-1]}" if len(versions) > 1 else f"version {versions[0]}"]
        if versions
        else []
    )
    return " · ".join(parts)


def turns_of(rollout: dict[str, Any]) -> list[dict[str, Any]]:
    """The conversation: of a single turn, the prompt and the completion."""
    if rollout.get("transcript"):
        return list(rollout["transcript"])
    prompt = rollout.get("prompt")
    said = prompt if isinstance(prompt, list) else [{"role": "user", "content": str(prompt)}]
    messages = [{"kind": "message", **message} for message in said]
    action = {"kind": "action", "text": rollout["completion"], "truncated": rollout["truncated"]}
    return [*messages, action | {"reward": rollout["reward"] or 0.0}]


def actor(turn: dict[str, Any]) -> str:
    """Who sampled a turn: the policy, with the agent's name where there are several."""
    name = turn.get("agent", MAIN_AGENT)
    return "policy" if name in ("", MAIN_AGENT) else f"policy as {name}"


def likelihood(logprob: float) -> float:
    """Probability in percent-free terms, for shades: 1 is certain."""
    return math.exp(max(logprob, -30.0))


def token_text(row: dict[str, Any]) -> Text:
    """A row with the tokens that were sampled in green."""
    text = Text()
    for token, trained, logprob in zip(row["tokens"], row["trained"], row["logprobs"], strict=True):
        shade = int(120 + 135 * likelihood(logprob))
        text.append(token, style=f"black on rgb({255 - shade // 2},{shade},{255 - shade // 2})" if trained else "dim")
    return text


def show(rollouts: list[dict[str, Any]], console: Console, tokens: bool) -> None:
    """Prints rollouts, a panel each."""
    for rollout in rollouts:
        body = Text()
        for turn in turns_of(rollout):
            if turn["kind"] == "action":
                body.append(f"{actor(turn)}  ", style="green bold")
                body.append(f"{turn['text']}", style="green")
                body.append(CUT_OFF if turn.get("truncated") else "", style="red")
                body.append(f"   [{turn['reward']:+g}]\n" if turn.get("reward") else "\n", style="bold")
            elif turn["kind"] == "message":
                body.append(f"{turn.get('role', '')}  ", style="bold")
                body.append(f"{turn.get('content', '')}\n")
            else:
                body.append(f"{turn.get('text', '')}\n", style="red")
        if tokens:
            for row in rollout.get("rows", []):
                body.append(
                    f"\nrow of {row['agent']}, {row['num_tokens']} tokens, outcome {row['reward']:g}\n", style="bold"
                )
                body.append_text(token_text(row))
                body.append("\n")
        if rollout["error"]:
            body.append("\n" + rollout["error"].strip(), style="red")
        style = "red" if rollout["status"] != "ok" else "green" if (rollout["reward"] or 0) > 0 else "white"
        console.print(Panel(body, title=headline(rollout), title_align="left", border_style=style))


def page(rollouts: Iterable[dict[str, Any]], title: str) -> str:
    """A page that needs nothing else."""
    parts = [f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"]
    parts.append(f"<h1>{html.escape(title)}</h1>")
    for rollout in rollouts:
        kind = "bad" if rollout["status"] != "ok" else "good" if (rollout["reward"] or 0) > 0 else ""
        parts.append(f"<h2 class='{kind}'>{html.escape(headline(rollout))}</h2>")
        parts += [turn_html(turn) for turn in turns_of(rollout)]
        if rollout["error"]:
            parts.append(f"<div class='turn bad'>{html.escape(rollout['error'].strip())}</div>")
        for row in rollout.get("rows", []):
            about = (
                f"{row['agent']}: {row['num_tokens']} tokens, {sum(row['trained'])} trained, outcome {row['reward']:g}"
            )
            parts.append(
                f"<details><summary>{html.escape(about)}</summary><div class=row>{row_html(row)}</div></details>"
            )
        numbers = "".join(f"<td>{html.escape(k)} {v:g}</td>" for k, v in sorted(rollout.get("metrics", {}).items()))
        parts.append(f"<table><tr>{numbers}</tr></table>" if numbers else "")
    return "\n".join(parts) + "\n"


def turn_html(turn: dict[str, Any]) -> str:
    who = actor(turn) if turn["kind"] == "action" else turn.get("role", "note")
    text = turn.get("text") if turn["kind"] != "message" else turn.get("content")
    reward = f"<span class=reward>{turn['reward']:+g}</span>" if turn.get("reward") else ""
    inside = f"<span class=who>{html.escape(str(who))}</span>\n{html.escape(str(text or ''))}"
    inside += f"<span class=bad>{CUT_OFF}</span>" if turn.get("truncated") else ""
    return f"<div class='turn {turn['kind']}'>{reward}{inside}</div>"


def row_html(row: dict[str, Any]) -> str:
    """Tokens as spans; what is known of each is its tooltip."""
    spans = []
    columns = zip(row["tokens"], row["ids"], row["trained"], row["logprobs"], row["versions"], strict=True)
    for number, (token, token_id, trained, logprob, version) in enumerate(columns):
        told = f"id {token_id}"
        style = "class=seen"
        if trained:
            told += f", logprob {logprob:g} (p {likelihood(logprob):.3f}), version {version}"
            style = f"style='background: hsl(135 60% {90 - 45 * (1 - likelihood(logprob)):.0f}%)'"
        if str(number) in row["rewards"]:
            told += f", reward {row['rewards'][str(number)]:+g}"
        spans.append(f"<span {style} title='{html.escape(told)}'>{html.escape(token)}</span>")
    if len(row["tokens"]) < row["num_tokens"]:
        cut = f"<span class=cut>[{row['num_tokens'] - len(row['tokens'])} tokens left out]</span>"
        spans.insert(len(spans) // 2, cut)
    return "".join(spans)


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    try:
        rollouts = load(args.run)
    except FileNotFoundError as error:
        what = "it has no rollouts (yet)" if args.run.is_dir() else "there is no such run folder"
        print(f"error: {args.run}: {what}; {error.filename} cannot be found", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    chosen = choose(rollouts, args)
    if not chosen:
        steps = sorted({r["step"] for r in rollouts})
        known = f"; it has rollouts of steps {steps[0]} to {steps[-1]}" if steps else ", which holds no rollouts yet"
        print(f"error: nothing to show in {args.run}{known}", file=sys.stderr)
        return 1
    if args.html is None:
        show(chosen, Console(), args.tokens)
        return 0
    args.html.write_text(page(chosen, f"Rollouts of {args.run.name}"))
    print(f"wrote {args.html}: {len(chosen)} of {len(rollouts)} rollouts")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
