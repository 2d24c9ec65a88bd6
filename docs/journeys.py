"""Follow the journeys and searches of docs/symptoms.toml, and the links of alerts, over the built site.

`python docs/journeys.py docs/_build` names what is not found, and code that a copy would corrupt.

The searches need node, which runs the site's own search.
"""

import re
import shutil
import subprocess
import sys
import tomllib
from html import unescape
from itertools import pairwise
from os.path import normpath
from pathlib import Path

HERE = Path(__file__).parent
MOST_CLICKS = 2
TYPOGRAPHIC = "[\u2013\u2018\u2019\u201c\u201d]"
SEARCH = """
const fs = require("fs"), vm = require("vm"), site = process.argv[1] + "/";
const element = { children: [], childNodes: [], removeChild() {} };
const page = { addEventListener() {}, getElementById: () => element,
  documentElement: { dataset: { content_root: "" } } };
const context = vm.createContext({ document: page, console, _: text => text, _ready() {}, URLSearchParams,
  SPHINX_HIGHLIGHT_ENABLED: false });
context.window = context;
for (const file of ["_static/documentation_options.js", "_static/base-stemmer.js", "_static/english-stemmer.js",
  "_static/language_data.js", "_static/searchtools.js", "searchindex.js"])
  if (fs.existsSync(site + file)) vm.runInContext(fs.readFileSync(site + file, "utf8"), context);
const run = vm.runInContext("query => Search._performSearch(...Search._parseQuery(query))", context);
for (const query of process.argv.slice(2)) console.log(run(query).at(-1)?.[0] ?? "nothing");
"""


KNOWN = tomllib.loads((HERE / "symptoms.toml").read_text(encoding="utf-8"))


def searches() -> dict[str, str]:
    """Return what people search for and the page that is to be first; a symptom leads to all incidents by symptom."""
    terms = (term for symptom in KNOWN["symptom"] for term in symptom["terms"].split(", "))
    return dict.fromkeys(terms, "generated/incidents/index") | KNOWN["search"]


def typographic(site: Path) -> list[str]:
    """Name the pages whose code has an en dash or curly quotes, which whoever copies it would paste into a shell."""
    wrong = []
    for file in sorted(site.rglob("*.html")):
        code = re.findall(r"<(code|pre)\b[^>]*>(.*?)</\1>", file.read_text(encoding="utf-8"), flags=re.DOTALL)
        if marks := sorted({mark for _, text in code for mark in re.findall(TYPOGRAPHIC, unescape(text))}):
            wrong.append(f"{file.relative_to(site)}: {' '.join(marks)} in code")
    return wrong


def main(site: Path) -> list[str]:
    """Return what a reader does not find."""
    wrong = []
    for question, pages in KNOWN["journeys"].items():
        wrong += [f"{question}: more than {MOST_CLICKS} clicks"] * (len(pages) > MOST_CLICKS + 1)
        for here, there in pairwise(pages):
            text = (site / f"{here}.html").read_text(encoding="utf-8")
            links = {normpath(Path(here).parent / link) for link in re.findall(r'href="([^"#:]+)\.html', text)}
            wrong += [] if there in links else [f"{question}: {here} has no link to {there}"]
    alerts = (HERE.parent / "alerts" / "diag.rules.yaml").read_text(encoding="utf-8")
    for path in sorted(set(re.findall(r"runbook_url: https://\S+?/en/stable/(\S+)", alerts))):
        wrong += [] if (site / path).is_file() else [f"an alert links to {path}, which the site does not have"]
    wrong += typographic(site)
    if node := shutil.which("node"):
        queries = list(searches())
        found = subprocess.run([node, "-e", SEARCH, site, *queries], capture_output=True, text=True, check=True).stdout
        for query, first in zip(queries, found.splitlines(), strict=True):
            right = searches()[query]
            wrong += [] if first == right else [f"a search for '{query}' shows {first} first, not {right}"]
    return wrong


if __name__ == "__main__":
    problems = main(Path(sys.argv[1]))
    print("\n".join(problems) or "every journey and search leads to its page")
    sys.exit(bool(problems))
