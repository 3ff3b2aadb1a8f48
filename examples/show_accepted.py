"""Streams a reply in colour: tokens on green were drafted and accepted.

    python examples/show_accepted.py "Why is the sky blue?"
    python examples/show_accepted.py "Why is the sky blue?" --png answer.png   # needs matplotlib

The stream names the steps of the engine. The last token of a step comes from the model, and those
before it are drafts that the model accepted. SLIPSTREAM_URL is the server's URL,
SLIPSTREAM_API_KEY its key.
"""

import argparse
import json
import os
from collections.abc import Iterator

import httpx

GREEN, RESET = "\033[30;42m", "\033[0m"
Token = tuple[str, bool]  # text, and whether it is an accepted draft


def lines(reply: httpx.Response) -> Iterator[str]:
    """The lines of a stream. httpx would also end a line at U+2028 and its kin, which JSON may hold
    as they are."""
    rest = ""
    for text in reply.iter_text():
        *whole, rest = (rest + text).split("\n")
        yield from whole


def stream(question: str, max_tokens: int) -> Iterator[list[Token]]:
    """Send a chat to the server and yield the tokens of each step as they arrive."""
    url = os.environ.get("SLIPSTREAM_URL", "http://127.0.0.1:8000")
    headers = {"Authorization": f"Bearer {os.environ.get('SLIPSTREAM_API_KEY', 'none')}"}
    models = httpx.get(f"{url}/v1/models", headers=headers).raise_for_status().json()
    body = {
        "model": models["data"][0]["id"],
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "speculative": {"steps": True},
    }
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json=body, headers=headers, timeout=120
    ) as reply:
        reply.raise_for_status()
        for line in lines(reply):
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                for step in choice.get("speculative_steps", ()):
                    accepted = step["num_accepted"]
                    yield [(text, i < accepted) for i, text in enumerate(step["tokens"])]


def summary(steps: list[list[Token]]) -> str:
    """A sentence with the number of tokens per step."""
    tokens = sum(map(len, steps))
    return f"{tokens} tokens in {len(steps)} steps, {tokens / max(len(steps), 1):.2f} per step"


def draw(steps: list[list[Token]], path: str, width: int = 72) -> None:
    """Draw the reply as a PNG with lines of at most `width` characters."""
    from matplotlib.figure import Figure

    lines: list[list[Token]] = [[]]
    for text, drafted in (token for step in steps for token in step):
        for index, part in enumerate(text.split("\n")):
            if index or sum(len(t) for t, _ in lines[-1]) + len(part) > width:
                lines.append([])
                part = part if index else part.lstrip()
            if part:
                lines[-1].append((part, drafted))
    figure = Figure(figsize=(width * 0.112, 0.62 + 0.27 * len(lines)), dpi=150)
    axes = figure.add_axes((0.02, 0.02, 0.96, 0.96))
    axes.set_axis_off()
    axes.set_xlim(0, width)
    axes.set_ylim(len(lines) + 1.6, -0.6)
    for row, line in enumerate(lines):
        column = 0
        for text, drafted in line:
            for letter in text:
                colour = "#bfe8c4" if drafted else "white"
                axes.add_patch(_cell(column, row, colour))
                axes.text(
                    column + 0.5, row, letter, family="monospace", size=9, ha="center", va="center"
                )
                column += 1
    axes.add_patch(_cell(0, len(lines) + 0.7, "#bfe8c4"))
    axes.text(1.6, len(lines) + 0.7, f"drafted and accepted: {summary(steps)}", size=9, va="center")
    figure.savefig(path)


def _cell(column: float, row: float, colour: str):  # type: ignore[no-untyped-def]
    from matplotlib.patches import Rectangle

    return Rectangle((column, row - 0.45), 1, 0.9, facecolor=colour, edgecolor="none")


def main() -> None:
    """Print the reply and the number of tokens per step; draw it if --png is given."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "question", nargs="?", default="Why is the sky blue?", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=100, help="length limit of the reply (default: 100)"
    )
    parser.add_argument("--png", metavar="FILE", help="also draw the coloured reply as a PNG")
    args = parser.parse_args()
    steps = []
    for step in stream(args.question, args.max_tokens):
        steps.append(step)
        for text, drafted in step:
            print(f"{GREEN}{text}{RESET}" if drafted else text, end="", flush=True)
    print(f"\n\n{summary(steps)}")
    if args.png and steps:
        draw(steps, args.png)


if __name__ == "__main__":
    main()
