"""Page that `Trace.save_html` writes: a timeline in one file that zooms and needs no network."""

from __future__ import annotations

import json
from typing import Any

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>__TITLE__</title><style>
body { margin: 0; font: 13px sans-serif; color: #222; }
header { padding: 8px 12px; } h1 { font-size: 16px; margin: 0 0 4px; }
.key { display: inline-block; width: 12px; height: 12px; margin: 0 4px 0 12px; vertical-align: -1px; }
#view { display: block; width: 100%; cursor: grab; }
#tip { position: fixed; display: none; max-width: 60em; padding: 4px 8px; background: #222; color: #fff;
       border-radius: 3px; pointer-events: none; }
</style></head><body>
<header><h1>__TITLE__</h1>One row per warp and kind of asynchronous work; time is cycles of a simple
model. Wheel: zoom. Drag: move. Double click: all of it.<span id="keys"></span></header>
<canvas id="view"></canvas><div id="tip"></div>
<script>
const data = __DATA__;
const LEFT = 170, ROW = 18, GROUP = 24;
const view = document.getElementById("view"), tip = document.getElementById("tip");
const pen = view.getContext("2d");
const rows = []; let height = 24;
for (const group of data.groups) {
  group.y = height; height += GROUP;
  for (const row of group.rows) { row.y = height; rows.push(row); height += ROW; }
}
let from = 0, until = Math.max(1, data.end);
const keys = document.getElementById("keys");
for (const [kind, colour] of Object.entries(data.colours)) {
  const box = document.createElement("span");
  box.className = "key"; box.style.background = colour;
  keys.append(box, kind);
}
const place = (time) => LEFT + (time - from) / (until - from) * (view.clientWidth - LEFT);
const moment = (x) => from + (x - LEFT) / (view.clientWidth - LEFT) * (until - from);
function draw() {
  const ratio = window.devicePixelRatio || 1;
  view.width = view.clientWidth * ratio; view.height = height * ratio; view.style.height = height + "px";
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, view.clientWidth, height);
  pen.font = "11px sans-serif"; pen.textBaseline = "middle";
  const step = 10 ** Math.floor(Math.log10(until - from));
  for (let t = Math.ceil(from / step) * step; t <= until; t += step) {
    pen.fillStyle = "#ddd"; pen.fillRect(place(t), 12, 1, height);
    pen.fillStyle = "#555"; pen.fillText(t.toLocaleString("en"), place(t) + 3, 8);
  }
  for (const row of rows) {
    for (const [begin, end, kind] of row.spans) {
      if (end < from || begin > until) continue;
      const x = Math.max(LEFT, place(begin)), width = Math.max(1, place(Math.max(end, begin + 0.5)) - x);
      pen.fillStyle = data.colours[kind]; pen.fillRect(x, row.y + 2, width, ROW - 4);
      if (row.separate && width > 3) {
        pen.strokeStyle = "#fff"; pen.strokeRect(x + .5, row.y + 2.5, width - 1, ROW - 5);
      }
    }
  }
  pen.fillStyle = "#fff"; pen.fillRect(0, 0, LEFT, height);
  for (const group of data.groups) {
    pen.fillStyle = "#eee"; pen.fillRect(0, group.y + 2, view.clientWidth, GROUP - 4);
    pen.fillStyle = "#222"; pen.font = "bold 12px sans-serif";
    pen.fillText(group.name, 8, group.y + GROUP / 2);
    pen.font = "11px sans-serif";
    for (const row of group.rows) pen.fillText(row.name, 16, row.y + ROW / 2);
  }
}
view.addEventListener("wheel", (event) => {
  event.preventDefault();
  const at = moment(Math.max(LEFT, event.offsetX)), factor = Math.exp(event.deltaY / 400);
  from = at - (at - from) * factor; until = at + (until - at) * factor;
  if (until - from < 2) until = from + 2;
  draw();
}, { passive: false });
let held = null;
view.addEventListener("mousedown", (event) => { held = event.offsetX; });
window.addEventListener("mouseup", () => { held = null; });
view.addEventListener("dblclick", () => { from = 0; until = Math.max(1, data.end); draw(); });
view.addEventListener("mousemove", (event) => {
  if (held !== null) {
    const by = moment(held) - moment(event.offsetX);
    from += by; until += by; held = event.offsetX; draw();
  }
  const row = rows.find((r) => r.y <= event.offsetY && event.offsetY < r.y + ROW);
  const time = moment(event.offsetX);
  const slack = (until - from) / view.clientWidth;
  const hit = row && row.spans.filter(([b, e]) => b - slack <= time && time <= Math.max(e, b + .5) + slack);
  tip.style.display = hit && hit.length ? "block" : "none";
  if (hit && hit.length) {
    tip.textContent = hit.slice(0, 4).map(([b, e, kind, what, n]) =>
      `${b.toLocaleString("en")} to ${e.toLocaleString("en")}: ${what || kind}`
      + (n ? `, ${n} instructions` : "")).join("; ");
    tip.style.left = Math.min(event.clientX + 12, window.innerWidth - 320) + "px";
    tip.style.top = event.clientY + 16 + "px";
  }
});
window.addEventListener("resize", draw);
draw();
</script></body></html>
"""


def page(title: str, groups: list[dict[str, Any]], end: int, colours: dict[str, str]) -> str:
    """Returns the page.

    Args:
        title: Title of the page.
        groups: One group per CTA: `name` and `rows`. Each row has `name`, `separate` (whether its spans are
            individual operations) and `spans`: begin, end, kind, what and instructions.
        end: Last time.
        colours: Colour of each kind.
    """
    data = json.dumps({"groups": groups, "end": end, "colours": colours}).replace("<", "\\u003c")
    text = title.replace("&", "&amp;").replace("<", "&lt;")
    return PAGE.replace("__TITLE__", text).replace("__DATA__", data)
