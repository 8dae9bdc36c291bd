"""The page's own JavaScript: unpacks Plotly, draws the figures, follows light and dark, shows one rank at a time."""

from __future__ import annotations

SCRIPT = r"""
"use strict";
(() => {
const figures = JSON.parse(document.getElementById("figures").textContent);
// The buttons are named one by one: newer versions of Plotly add some that would use the network.
const buttons = ["zoom2d", "pan2d", "resetScale2d", "toImage"];
const config = {responsive: true, displaylogo: false, displayModeBar: "hover", showTips: false,
  toImageButtonOptions: {format: "svg"}};
const named = /^var\((--[a-z-]+)\)$/;

// Strings under a color key are names of the stylesheet; all other strings stay as they are.
function resolved(value, key, style) {
  if (typeof value === "string") {
    const match = /colors?$/.test(key) && named.exec(value);
    return match ? style.getPropertyValue(match[1]).trim() : value;
  }
  if (Array.isArray(value)) return value.map(item => resolved(item, key, style));
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, resolved(v, k, style)]));
}

const axis = {gridcolor: "var(--grid)", zerolinecolor: "var(--line)", linecolor: "var(--line)",
  tickcolor: "var(--line)", automargin: true, fixedrange: false};

function layoutOf(figure, narrow) {
  const base = {paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", uirevision: "kept",
    font: {family: getComputedStyle(document.body).fontFamily, size: narrow ? 11 : 12.5, color: "var(--text)"},
    margin: {l: 8, r: 8, t: 8, b: 8}, dragmode: narrow ? false : "zoom",
    modebar: {bgcolor: "rgba(0,0,0,0)", color: "var(--dim)", activecolor: "var(--text)"},
    hoverlabel: {bgcolor: "var(--card)", bordercolor: "var(--line)", font: {color: "var(--text)", family: getComputedStyle(document.body).fontFamily}, align: "left", namelength: -1},
    legend: {orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal", font: {color: "var(--text)"}}};
  const layout = {...base, ...figure.layout, height: figure.height};
  for (const key of ["margin", "legend", "hoverlabel"])
    layout[key] = {...base[key], ...(figure.layout[key] || {})};
  for (const key of Object.keys(layout))
    if (/^[xy]axis/.test(key)) layout[key] = {...axis, ...layout[key]};
  return layout;
}

function draw(div) {
  const figure = figures[div.dataset.figure];
  const style = getComputedStyle(document.documentElement);
  const layout = layoutOf(figure, div.clientWidth < 560);
  Plotly.react(div, resolved(figure.traces, "", style), resolved(layout, "", style),
    {...config, modeBarButtons: [figure.layout.xaxis ? buttons : ["toImage"]]});
  div.dataset.drawn = "yes";
}

let isUnpacked = false;

function drawVisible() {
  if (!isUnpacked) return;
  for (const div of document.querySelectorAll(".plot"))
    if (div.offsetParent !== null) draw(div);
}

function showRank(rank) {
  for (const block of document.querySelectorAll("[data-rank]"))
    block.hidden = block.dataset.rank !== rank;
  drawVisible();
}

async function unpack() {
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), c => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
  isUnpacked = true;
}

const chooser = document.getElementById("rank");
if (chooser) {
  chooser.addEventListener("change", () => showRank(chooser.value));
  showRank(chooser.value);
}
unpack().then(drawVisible, () => { document.getElementById("undrawn").hidden = false; });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawVisible);
addEventListener("beforeprint", () => { document.documentElement.dataset.paper = "yes"; drawVisible(); });
addEventListener("afterprint", () => { delete document.documentElement.dataset.paper; drawVisible(); });
})();
"""
