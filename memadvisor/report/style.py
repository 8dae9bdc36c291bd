"""The page's look. Colors stand here alone, once for light and once for dark; figures name them.

Category and phase colors stay apart for readers with protanopia, deuteranopia and tritanopia
(tests/report/test_style.py simulates them), and no figure says anything by color alone.
"""

from __future__ import annotations

CATEGORY_COLORS: dict[str, tuple[str, str]] = {  # light, dark
    "parameter": ("#0037de", "#2d57ce"),
    "optimizer-state": ("#9e68ff", "#ce74ff"),
    "gradient": ("#c8410a", "#d95716"),
    "activation": ("#1b8c83", "#15bfb2"),
    "input": ("#69b711", "#9fba22"),
    "temporary": ("#ecd355", "#ffd551"),
    "communication": ("#9a0089", "#a8296f"),
    "weight-copy": ("#6fe3fb", "#a0cdf6"),
    "other": ("#bfa4c0", "#877e98"),
    "unexplained": ("#30343b", "#e8eaee"),
}
PHASE_COLORS: dict[str, tuple[str, str]] = {
    "forward": ("#2f7de1", "#4b94f0"),
    "backward": ("#b3317f", "#d94fa0"),
    "optimizer": ("#2a6b2f", "#3f9447"),
    "outside": ("#a9c6dc", "#b9d6ea"),
    "recompute": ("#e8902a", "#f5a444"),
}
_SURFACE_COLORS: dict[str, tuple[str, str]] = {
    "page": ("#f6f7f9", "#0d1016"),
    "card": ("#ffffff", "#151a22"),
    "text": ("#1a1e26", "#e6e9ef"),
    "dim": ("#596273", "#9aa5b6"),
    "line": ("#dfe3ea", "#2a313d"),
    "grid": ("#e8ebf0", "#262d38"),
    "accent": ("#0b57d0", "#8ab4f8"),
    "warning": ("#8a4b00", "#ffc46b"),
    "warning-back": ("#fff4e0", "#33270f"),
    "tile": ("#e9edf3", "#222a36"),
    "kept-light": ("#b9dedb", "#0d5a53"),
    "wait": ("#c9ced6", "#4b5463"),
    "exposed": ("#b42318", "#f97066"),
    "overlapped": ("#6c9fd4", "#5b8fc7"),
}


_INK, _PAPER = "#0d1016", "#ffffff"


def _text_on(color: str) -> str:
    """Ink or paper, whichever is further from the color: of one of them the contrast is 4.5 or more (WCAG 2.1)."""
    light = _luminance(color) + 0.05
    return _INK if light / (_luminance(_INK) + 0.05) > (_luminance(_PAPER) + 0.05) / light else _PAPER


def _luminance(color: str) -> float:
    """Relative, of an sRGB color (WCAG 2.1)."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def stylesheet() -> str:
    """CSS of the page, with its colors for light, dark and paper."""
    filled = {**CATEGORY_COLORS, **PHASE_COLORS, "dim": _SURFACE_COLORS["dim"]}
    text = {f"on-{name}": (_text_on(pair[0]), _text_on(pair[1])) for name, pair in filled.items()}
    colors = {**_SURFACE_COLORS, **CATEGORY_COLORS, **PHASE_COLORS, **text}
    light = "".join(f"--{name}:{pair[0]};" for name, pair in colors.items())
    dark = "".join(f"--{name}:{pair[1]};" for name, pair in colors.items())
    return (
        f":root{{color-scheme:light dark;{light}}}"
        f"@media screen and (prefers-color-scheme:dark){{:root:not([data-paper]){{{dark}}}}}"
        f"{_RULES}"
    )


_RULES = """
*{box-sizing:border-box}
html{scroll-behavior:smooth;scroll-padding-top:4.2rem;-webkit-text-size-adjust:100%}
@media (prefers-reduced-motion:reduce){html{scroll-behavior:auto}}
body{margin:0;background:var(--page);color:var(--text);
  font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
a{color:var(--accent)}
code,.mono{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:.92em}
.option{white-space:nowrap}
header{position:sticky;top:0;z-index:20;display:flex;align-items:center;gap:.4rem 1rem;flex-wrap:wrap;
  padding:.55rem clamp(.8rem,3vw,2rem);background:var(--card);border-bottom:1px solid var(--line)}
header .brand{font-weight:700;letter-spacing:-.01em}
header .script{color:var(--dim);overflow:hidden;text-overflow:ellipsis;white-space:nowrap;max-width:60ch;flex:1 1 12ch}
header label{color:var(--dim);margin-left:auto}
select{font:inherit;color:var(--text);background:var(--page);border:1px solid var(--line);border-radius:6px;padding:.15rem .4rem}
.page{display:grid;grid-template-columns:13rem minmax(0,1fr);gap:2rem;max-width:1420px;margin:0 auto;
  padding:1.4rem clamp(.8rem,3vw,2rem) 4rem}
nav{position:sticky;top:4.6rem;align-self:start;font-size:.92rem}
nav ol{list-style:none;margin:0;padding:0}
nav a{display:block;padding:.22rem .6rem;color:var(--dim);text-decoration:none;border-left:2px solid var(--line)}
nav a:hover,nav a:focus-visible{color:var(--text);border-color:var(--accent)}
main{min-width:0}
h1{font-size:clamp(1.35rem,3.2vw,1.9rem);line-height:1.25;letter-spacing:-.02em;margin:.1rem 0 .5rem;overflow-wrap:anywhere}
h2{font-size:1.25rem;letter-spacing:-.01em;margin:2.6rem 0 .15rem}
h3{font-size:1rem;margin:0;display:inline}
.lead{color:var(--dim);margin:0 0 .9rem;max-width:80ch}
.facts{color:var(--dim);margin:.2rem 0 1.2rem;overflow-wrap:anywhere}
.alone{grid-template-columns:minmax(0,1fr)}
.cards{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:1rem;margin:0 0 1rem}
.card,figure{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:1rem 1.1rem;margin:0 0 1rem;min-width:0}
.cards .card{margin:0}
.cards .wide{grid-column:1/-1}
.card .kind{margin-right:.5rem}
.card .name{color:var(--dim);font-size:.9rem}
.card .value{font-size:1.85rem;font-weight:650;letter-spacing:-.025em;line-height:1.25}
.card .value.absent{color:var(--dim);font-size:1.3rem}
.card p{margin:.15rem 0 .5rem;overflow-wrap:anywhere}
.bar{display:flex;height:14px;border-radius:4px;overflow:hidden;background:var(--tile);margin:.5rem 0 .45rem}
.bar span{min-width:1px;border-right:1px solid var(--card)}
.bar span:last-child{border-right:0}
.legend{display:flex;flex-wrap:wrap;gap:.1rem .95rem;margin:0;padding:0;list-style:none;font-size:.87rem;color:var(--dim)}
.legend b{color:var(--text);font-weight:600;font-variant-numeric:tabular-nums;white-space:nowrap}
.legend i{display:inline-block;width:.75em;height:.75em;border-radius:2px;margin-right:.4em;border:1px solid var(--line)}
.next :is(ol,ul){margin:.3rem 0 0;padding-left:1.2rem}
.next li{margin:.35rem 0;overflow-wrap:anywhere}
pre{margin:.5rem 0 0;padding:.6rem .8rem;background:var(--page);border:1px solid var(--line);border-radius:6px;overflow-x:auto}
figcaption{display:flex;flex-wrap:wrap;align-items:baseline;gap:.3rem .7rem;margin-bottom:.4rem}
.kind{font-size:.72rem;font-weight:650;letter-spacing:.04em;text-transform:uppercase;border-radius:4px;padding:.05rem .4rem;
  border:1px solid currentColor}
.kind-measured{color:var(--activation)}
.kind-predicted{color:var(--optimizer-state)}
.kind-theory,.kind-datasheet,.kind-given{color:var(--dim)}
.basis{color:var(--dim);font-size:.87rem;min-width:0;overflow-wrap:anywhere}
.plot{width:100%}
.plot .modebar-container{top:-2.3rem!important}
.note{color:var(--dim);font-size:.87rem;margin:.4rem 0 0;max-width:95ch;overflow-wrap:anywhere}
.missing{border-style:dashed;color:var(--dim)}
.missing p{margin:.2rem 0 0}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.93rem}
th{color:var(--dim);font-weight:600;text-align:left;font-size:.85rem;vertical-align:bottom}
th,td{padding:.28rem .9rem .28rem 0;border-bottom:1px solid var(--line)}
td{vertical-align:top;white-space:nowrap}
td.words{white-space:normal;min-width:9rem}
td:first-child{white-space:normal;overflow-wrap:anywhere;min-width:9rem}
td.inner:first-child{padding-left:1em;min-width:10rem}
th.number,td.number{text-align:right}
th:last-child,td:last-child{padding-right:0}
table.effect{width:auto}
table.effect :is(td,th):not(:last-child){padding-right:1.6rem}
tr.total td{font-weight:650;border-bottom:0}
tbody tr:hover{background:var(--page)}
.alert{background:var(--warning-back);color:var(--warning);border:1px solid currentColor;border-radius:8px;padding:.55rem .9rem;margin:0 0 1rem;overflow-wrap:anywhere}
.alert ul{margin:.2rem 0;padding-left:1.2rem}
dl{margin:0}
dt{font-weight:650;margin-top:.55rem}
dd{margin:0 0 .2rem;color:var(--dim);max-width:90ch}
[hidden]{display:none!important}
footer{color:var(--dim);font-size:.87rem;margin-top:2.5rem;border-top:1px solid var(--line);padding-top:.8rem}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:0 1rem}
@media (max-width:1000px){.page{grid-template-columns:minmax(0,1fr);gap:.8rem}nav{position:static}nav ol{display:flex;flex-wrap:wrap;gap:0 .9rem}nav a{padding:.1rem 0;border-left:0}nav a:is(:hover,:focus-visible){text-decoration:underline}}
@media (max-width:640px){.plot .modebar-container{display:none}.cards{grid-template-columns:minmax(0,1fr)}.card,figure{padding:.8rem}header .script{display:none}
  th,td{padding-right:.6rem}td:first-child{min-width:6.5rem}
  table.effect :is(td,th):not(:last-child){padding-right:.7rem}table.effect td:first-child{min-width:5.5rem}}
@media print{
  body{background:#fff;font-size:11pt}
  header{position:static}nav,header label,select,.modebar{display:none!important}
  .page{display:block;padding:0;max-width:none}
  figure,.card{break-inside:avoid;border-color:#ccc}
  h2{break-after:avoid}
}
"""
