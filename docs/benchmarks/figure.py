"""Draws `docs/step.svg` from what `mpitrain bench peers` measured: `python docs/benchmarks/figure.py`."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
FILES = ("peers-openmpi-2.json", "peers-openmpi-2-vgg.json")
MODELS = {"mlp50k": "MLP, 51 thousand", "mlp14m": "MLP, 14.2 million", "resnet50": "ResNet-50", "vgg16": "VGG-16"}
SERIES = (
    ("exchanged_seconds", "mpitrain", "ours"),
    ("MultiWorkerMirroredStrategy_seconds", "MultiWorkerMirroredStrategy", "peer"),
)
LEFT, TOP, UNIT, BAR, ROW, WIDTH = 150, 70, 100, 16, 50, 720
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f } .note { fill: #57606a; font-size: 12px }
.ours { fill: #0969da } .peer { fill: #afb8c1 } line { stroke: #57606a; stroke-dasharray: 3 3 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .note { fill: #9198a1 } .ours { fill: #4493f8 } .peer { fill: #656c76 }
  line { stroke: #9198a1 }
}
"""


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """A line of text; y of its base."""
    return f'<text x="{x:.0f}" y="{y:.0f}" class="{kind}" text-anchor="{anchor}">{words}</text>'


def main() -> None:
    """Read the measurements, write the figure."""
    rows = [row for name in FILES for row in json.loads((HERE / name).read_text())["rows"]]
    parts = [text(LEFT, 22, "A training step on 2 ranks, as a multiple of the same step on one rank alone")]
    for number, (_, name, kind) in enumerate(SERIES):
        parts.append(f'<rect x="{LEFT + 110 * number}" y="34" width="12" height="12" class="{kind}"/>')
        parts.append(text(LEFT + 110 * number + 18, 45, name, "note"))
    bottom = TOP + ROW * len(rows)
    parts.append(f'<line x1="{LEFT + UNIT}" x2="{LEFT + UNIT}" y1="{TOP - 8}" y2="{bottom - 8}"/>')
    for index, row in enumerate(rows):
        y, raw = TOP + ROW * index, row["raw"]
        parts.append(text(LEFT - 12, y + BAR + 5, MODELS[row["case"]["model"]], anchor="end"))
        for number, (key, _, kind) in enumerate(SERIES):
            times = median(raw[key]) / median(raw["alone_seconds"])
            top = y + number * (BAR + 2)
            parts.append(f'<rect x="{LEFT}" y="{top}" width="{times * UNIT:.1f}" height="{BAR}" class="{kind}"/>')
            parts.append(text(LEFT + times * UNIT + 6, top + 13, f"{times:.2f}", "note"))
    parts.append(text(LEFT, bottom + 8, "dashed: one rank alone; shorter is better", "note"))
    size = f'viewBox="0 0 {WIDTH} {bottom + 20}" width="{WIDTH}" height="{bottom + 20}"'
    body = "\n".join(parts)
    figure = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><style>{STYLE}</style>\n{body}\n</svg>\n'
    (HERE.parent / "step.svg").write_text(figure)


if __name__ == "__main__":
    main()
