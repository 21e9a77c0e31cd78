"""What every HTML page of trew has: one style, no script, no external resource, all untrusted text escaped."""

from __future__ import annotations

import base64
import functools
import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...utils.secrets import redact
from .svg import CSS
from .text import visible

_HIDDEN = "_hidden"  # a template's name for the secrets, which no value may have
_STYLE = """
:root{color-scheme:light dark;--ground:#fff;--ink:#1f2328;--muted:#59636e;--line:#d6dbe1;--soft:#f5f7f9}
@media (prefers-color-scheme:dark){:root{--ground:#14181d;--ink:#e6edf3;--muted:#9aa5b1;--line:#323a44;--soft:#1c2229}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1180px;padding:24px 20px 60px;background:var(--ground);color:var(--ink);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:24px;margin:0 0 4px}h2{font-size:18px;margin:36px 0 10px}h3{font-size:15px;margin:20px 0 6px}
p{margin:6px 0}.muted{color:var(--muted)}.scroll{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{text-align:left;vertical-align:top;padding:5px 14px 5px 0;border-bottom:1px solid var(--line)}
th{color:var(--muted);font-weight:500;white-space:nowrap}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,480px),1fr));gap:14px}
.charts figure{margin:0;border:1px solid var(--line);border-radius:8px;overflow:hidden}
.charts svg{display:block;width:100%;height:auto}
.strip svg{display:block;min-width:560px;width:100%;height:auto;border:1px solid var(--line);border-radius:8px}
.sample{border:1px solid var(--line);border-radius:8px;margin:12px 0;padding:10px 14px}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:6px 18px}
pre{margin:4px 0;padding:8px 10px;background:var(--soft);border-radius:6px;white-space:pre-wrap;overflow-wrap:anywhere;
font:13px/1.45 ui-monospace,monospace}
.said{display:grid;grid-template-columns:max-content 1fr;gap:2px 10px;margin:4px 0}
.said>*{min-width:0;overflow-wrap:anywhere}.who{color:var(--muted)}.words{white-space:pre-wrap}
.policy{background:var(--soft);border-radius:6px;padding:1px 8px}
.tag{display:inline-block;margin-right:10px;color:var(--muted)}.tag b{color:var(--ink);font-weight:600}
.note{border-left:3px solid #c2410c;padding:2px 0 2px 10px}
.up{background:rgb(31 98 189/var(--s))}.down{background:rgb(217 102 0/var(--s))}.up1,.down1{--s:.14}.up2,.down2{--s:.3}
.up3,.down3{--s:.5}.held{border-bottom:2px dotted var(--ink)}.given{font-style:italic;color:var(--muted)}
details{margin:8px 0}summary{cursor:pointer}
"""


def render(template: Path, hidden: tuple[str, ...], /, **values: Any) -> str:
    """Renders a template: text in ``values`` is escaped, and without secrets and invisible characters.

    ``hidden`` are the secrets. The template gets ``style`` and ``policy`` besides ``values``: the content security
    policy allows this one style and nothing else, so that no completion can smuggle in a script, image or style.
    """
    from markupsafe import Markup

    style = _STYLE + CSS
    # The policy names the style by its hash: a second style, which a completion might smuggle in, has another.
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    given = {"style": Markup(style), "policy": Markup(policy), _HIDDEN: hidden}
    return _environment(template.parent).get_template(template.name).render(**given, **values)


@functools.cache
def _environment(folder: Path) -> Any:
    """The templates of a folder. Kept, because compiling one takes longer than rendering it."""
    import jinja2
    from markupsafe import Markup

    @jinja2.pass_context
    def shown(context: Any, value: Any) -> Any:
        # Markup is made here, from text that is escaped already.
        text = isinstance(value, str) and not isinstance(value, Markup)
        return visible(redact(value, context[_HIDDEN])) if text else value

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=shown,
    )


def now() -> str:
    """The time for a page's footer."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
