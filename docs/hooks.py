"""Hooks of the site (mkdocs.yml).

On a code host a link to ../../examples/generate.py shows the file. On the site it leads to the repository (`repo_url`),
or without one is only its words.
"""

import os
import re
from typing import Any

LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(?:#[^)\s]*)?\)")
SIGNATURE = re.compile(r"<!-- ::: ([\w.]+)((?: \w+)*) -->\n### ([\w.]+)\n.*?<!-- end -->", re.DOTALL)


def described(match: re.Match[str]) -> str:
    """mkdocstrings' description of an object in place of the signature that code hosts show."""
    members = ", ".join(match[2].split())
    return f"::: {match[1]}\n    options: {{heading: {match[3]}, members: {f'[{members}]' if members else 'false'}}}\n"


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    def link(match: re.Match[str]) -> str:
        words, to = match.groups()
        path = os.path.normpath(os.path.join("docs", os.path.dirname(page.file.src_uri), to))
        if "://" in to or to.startswith("mailto:") or path.startswith("docs/"):
            return match[0]
        return f"[{words}]({config.repo_url.rstrip('/')}/blob/main/{path})" if config.repo_url else words

    return LINK.sub(link, SIGNATURE.sub(described, markdown))
