"""Colours and style sheet of the page: light and dark, no font or image from elsewhere."""

from __future__ import annotations

LIGHT = {
    "bg": "#ffffff",
    "panel": "#f5f7f9",
    "text": "#1b1f24",
    "soft": "#535c66",
    "line": "#d3d9e0",
    "edge": "#7c8792",
    "own": "#0b5cad",
    "active": "#96480a",
    "position": "#535c66",
    "good": "#17652f",
    "warn": "#7a4f00",
    "bad": "#a8201a",
}
DARK = {
    "bg": "#14171b",
    "panel": "#1d2228",
    "text": "#e6e9ec",
    "soft": "#a8b2bc",
    "line": "#38414b",
    "edge": "#7d8894",
    "own": "#6db1ff",
    "active": "#f0b063",
    "position": "#a8b2bc",
    "good": "#6cc98a",
    "warn": "#e6b450",
    "bad": "#ff9089",
}
"""Colours by use. `edge` draws the bounds of parts (3:1), everything but `line` and the grounds
`bg` and `panel` may be text (4.5:1 on both grounds)."""

TINTS = (0, 6, 12, 18, 24, 30, 36)
"""Percent of `own` mixed into `bg` for the cells of a matrix, from the least to the most."""


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


_RULES = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;text-size-adjust:100%}
body{font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans","DejaVu Sans",sans-serif;
color:var(--text);background:var(--bg);max-width:78rem;margin:0 auto;padding:1.25rem 1rem 3rem;
overflow-wrap:anywhere}
h1{font-size:1.15rem;font-weight:600;margin:0 0 .75rem}
h2{font-size:1.2rem;margin:2.5rem 0 .5rem;padding-bottom:.25rem;border-bottom:1px solid var(--line)}
h3{font-size:1rem;margin:1.5rem 0 .25rem}
p,ul{max-width:76ch;margin:.5rem 0}
.soft,figcaption,caption{color:var(--soft)}
a{color:var(--own)}
:focus-visible{outline:3px solid var(--own);outline-offset:2px}
code{font:.875em/1.4 ui-monospace,"DejaVu Sans Mono",Menlo,Consolas,monospace}
.hero{background:var(--panel);border:1px solid var(--line);border-left:6px solid var(--tone);
border-radius:4px;padding:1rem 1.25rem}
.good{--tone:var(--good)}.warn{--tone:var(--warn)}.bad{--tone:var(--bad)}
.word{font-size:2.25rem;line-height:1.1;font-weight:700;color:var(--tone);margin:0}
.decision{font-weight:600;margin:.25rem 0 1rem}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,12.5rem),1fr));
gap:1rem 1.5rem;margin:0}
.facts div{border-top:1px solid var(--line);padding-top:.5rem}
.facts dt{font-size:.875rem;color:var(--soft)}
.facts dd{margin:0}
.facts .value{font-size:1.3rem;line-height:1.25;font-weight:600;font-variant-numeric:tabular-nums}
.facts .detail{font-size:.875rem;color:var(--soft)}
.todo{margin:1.25rem 0 0;padding:.75rem 0 0;border-top:1px solid var(--line);max-width:none}
.message{font-size:.875rem;color:var(--soft);max-width:none;margin:.5rem 0 0}
nav{margin:1rem 0 0;font-size:.875rem}
nav ul{display:flex;flex-wrap:wrap;gap:.25rem 1.25rem;list-style:none;padding:0;max-width:none}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,34rem),1fr));gap:0 2rem;
align-items:start}
.thirds{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,22rem),1fr));gap:0 2rem;
align-items:start}
.pair>*,.thirds>*{min-width:0}
figure{margin:1rem 0}
figcaption{font-size:.875rem;max-width:76ch;margin-top:.25rem}
.name{font-weight:600;color:var(--text)}
.scroll{overflow-x:auto;max-width:100%;container-type:inline-size}
.tall{max-height:30rem;overflow-y:auto}
table{border-collapse:collapse;font-size:.875rem;font-variant-numeric:tabular-nums;
overflow-wrap:normal;margin:.5rem 0}
caption{text-align:left;padding:.25rem 0;font-size:.875rem;overflow-wrap:anywhere}
caption span{display:block;position:sticky;left:0;max-width:100cqw}
th,td{border-bottom:1px solid var(--line);padding:.25rem .75rem .25rem 0;text-align:right;
vertical-align:top;white-space:nowrap}
thead th{color:var(--soft);font-weight:600;vertical-align:bottom}
th{white-space:normal}
th[scope=row]{text-align:left;font-weight:400;min-width:6.5rem}
.left{text-align:left}
.wide{white-space:normal;min-width:13rem;text-align:left}
.wide code{overflow-wrap:anywhere}
.here th,.here td{font-weight:700}
.track{display:block;width:clamp(8rem,30vw,32rem);height:.75rem;margin-top:.25rem;position:relative}
.track i{position:absolute;left:0;top:0;bottom:0;background:var(--position)}
.track .own{background:var(--own)}.track .active{background:var(--active)}
.track .span{background:none;border:solid var(--text);border-width:0 2px;top:-2px;bottom:-2px}
.track .span::after{content:"";position:absolute;left:0;right:0;top:50%;border-top:2px solid
var(--text)}
.matrix td,.matrix thead th{padding:.375rem .75rem}
.matrix thead th:first-child{padding-left:0}
.matrix th{vertical-align:middle}
.matrix .diagonal{outline:2px solid var(--edge);outline-offset:-2px;font-weight:700}
.legend{display:flex;flex-wrap:wrap;gap:.25rem 1.25rem;font-size:.875rem;max-width:none}
.swatch{display:inline-block;width:3.5rem;height:.75rem;margin-right:.5rem;
border:1px solid var(--edge);forced-color-adjust:none}
details{margin:.5rem 0}
summary{cursor:pointer;color:var(--own);font-size:.875rem;padding:.25rem 0;width:fit-content}
svg{display:block;font:12px system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans","DejaVu Sans",
sans-serif;fill:var(--text);font-variant-numeric:tabular-nums}
svg .soft{fill:var(--soft)}
svg .grid{stroke:var(--line);fill:none}
svg .axis{stroke:var(--edge);fill:none}
svg .line{fill:none;stroke-width:2}
svg .own{stroke:var(--own);fill:var(--own)}
svg .active{stroke:var(--active);fill:var(--active)}
svg .position{stroke:var(--position);fill:var(--position)}
svg .line.own,svg .line.active,svg .line.position{fill:none}
svg .pale{fill-opacity:.45}
svg .cells{image-rendering:pixelated}
svg .over{stroke:#000;stroke-width:4;fill:none}
svg .border{stroke:#fff;stroke-width:2;fill:none}
footer{margin-top:3rem;font-size:.875rem;color:var(--soft)}
@media(max-width:30rem){.hero{padding:.75rem}}
@media(prefers-reduced-motion:reduce){*{animation:none!important;transition:none!important;
scroll-behavior:auto!important}}
@media print{.tall{max-height:none}}
"""


def sheet() -> str:
    """The whole style sheet."""
    tints = "".join(
        f".t{index}{{background:color-mix(in srgb,var(--own) {percent}%,var(--bg))}}"
        for index, percent in enumerate(TINTS)
    )
    return (
        f":root{{color-scheme:light dark;{_variables(LIGHT)}}}"
        f"@media(prefers-color-scheme:dark){{:root{{{_variables(DARK)}}}}}"
        f"{_RULES}{tints}"
    ).replace("\n", "")
