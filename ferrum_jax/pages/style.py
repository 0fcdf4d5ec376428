"""The style sheet of all pages: light or dark, at any width from a telephone's up."""

STYLE = """
:root{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--text:#1b2430;--soft:#5b6675;--line:#dfe3e9;
--a:#0b6e99;--b:#c2410c;--good:#15803d;--bad:#b91c1c;--rest:#cbd2db;--fill:#15803d}
@media(prefers-color-scheme:dark){:root{--bg:#11161d;--card:#1a212b;--text:#e6eaf0;--soft:#9aa6b5;--line:#2c3643;
--a:#5cc0ea;--b:#fb9a5b;--good:#4ade80;--bad:#f87171;--rest:#3a4656;--fill:#22a356}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--text);font:15px/1.5 system-ui,sans-serif}
main{max-width:1760px;margin:0 auto;padding:28px clamp(14px,3vw,48px) 48px}
h1{font-size:clamp(1.35rem,2.4vw,2rem);line-height:1.2;margin:.1em 0 .3em;overflow-wrap:anywhere}
h2{font-size:1.1rem;margin:2rem 0 .7rem}
.soft,figcaption span,.tile span,th{color:var(--soft)}
.state{display:inline-block;padding:.15em .7em;border-radius:1em;border:1px solid;font-weight:600;margin-right:.6em}
.good{color:var(--good)}.bad{color:var(--bad)}
.grid{display:grid;gap:14px}
.tiles{grid-template-columns:repeat(4,1fr)}@media(min-width:1500px){.tiles{grid-template-columns:repeat(8,1fr)}}
.plots{grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr))}
.facts{grid-template-columns:repeat(auto-fit,minmax(min(100%,360px),1fr));align-items:start}
.tile,figure,.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 16px;
margin:0;min-width:0}
.tile b{display:block;font-size:1.5rem;line-height:1.25;font-variant-numeric:tabular-nums}
.tile span{display:block;font-size:.86rem}
.bar{display:flex;height:10px;border-radius:5px;overflow:hidden;background:var(--rest);margin:1rem 0 1.2rem}
.bar i{display:block}.bar .good{background:var(--fill)}.bar .bad{background:var(--bad)}
figcaption{font-weight:600;display:flex;flex-wrap:wrap;justify-content:space-between;gap:0 1em;margin-bottom:6px}
figcaption span span{font-weight:400}figcaption span span+span{margin-left:1em}
figcaption span span:before{content:"";display:inline-block;
width:.9em;height:.22em;margin-right:.4em;vertical-align:middle;background:currentColor}
figcaption .a{color:var(--a)}figcaption .b{color:var(--b)}
svg{display:block;width:100%;height:auto}svg text{font-size:14px;fill:var(--soft)}
svg line,svg polyline{vector-effect:non-scaling-stroke;fill:none}svg .grid{stroke:var(--line)}
svg .band{fill:var(--line);opacity:.55}
svg .end{stroke:var(--soft);stroke-dasharray:4 4}svg polyline{stroke-width:2;stroke-linejoin:round}
svg .a{stroke:var(--a)}svg .b{stroke:var(--b)}
.card{overflow-x:auto;padding:6px 16px}.card h3{font-size:.95rem;margin:.6em 0 .2em}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
td,th{padding:.42em 1.1em .42em 0;text-align:right;white-space:nowrap;font-weight:400;border-top:1px solid var(--line)}
tr:first-child>*{border-top:0}td:first-child,th:first-child{text-align:left}td:last-child,th:last-child{padding-right:0}
.facts td:last-child{white-space:normal;overflow-wrap:anywhere}.facts td:first-child{color:var(--soft)}
summary{cursor:pointer}
.texts td,.texts th{text-align:left;white-space:normal;overflow-wrap:anywhere;vertical-align:top}
.texts td:first-child{min-width:18ch;max-width:30ch}.texts td:nth-child(2){white-space:nowrap;color:var(--bad)}
.runs td:nth-child(-n+3),.runs th:nth-child(-n+3){text-align:left}.runs tr:last-child td{font-weight:600}
@media(max-width:600px){svg text{font-size:22px}.tiles{grid-template-columns:1fr 1fr}.tile b{font-size:1.2rem}
.texts th{display:none}.texts tr{display:block;padding:.5em 0;border-top:1px solid var(--line)}
.texts tr:first-child,.texts tr:first-child+tr{border:0}.texts tr:first-child{padding:0}
.texts td{display:block;border:0;padding:0;max-width:none!important}.texts td:first-child{font-weight:600}
.runs{font-size:.9em}}
svg circle.a{fill:var(--a);stroke:none}svg circle.b{fill:none;stroke:var(--b);stroke-width:2}
svg .roof{stroke:var(--soft);stroke-width:2}svg .between{stroke:var(--rest)}
svg .number{font-size:12px;fill:var(--text)}
.cases{columns:2;margin:.8em 0 0;padding-left:2em;font-size:.86rem;color:var(--soft)}
.text{text-align:left!important}.check td.result{white-space:normal;min-width:8ch}
.pairs td{text-align:left;white-space:normal;overflow-wrap:anywhere}.pairs td:first-child{color:var(--soft);width:30%}
.wrong{padding-left:2em}.wrong li{margin:.3em 0;overflow-wrap:anywhere}
@media(max-width:600px){svg .number{font-size:18px}.cases{columns:1;font-size:.8rem}.check{font-size:.9em}}
"""
