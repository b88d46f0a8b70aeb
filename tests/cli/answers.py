"""Answers in Markdown, of the kinds that models give."""

from __future__ import annotations

WORDS = "Streams of text arrive in small pieces, and each of them belongs where it was said. "
ANSWERS = {
    "a word": "Yes.",
    "a paragraph": WORDS * 5,
    "paragraphs": "First of all.\n\nThen the second.\n\nAnd in the end the third.\n",
    "hard breaks": "Roses are red,  \nviolets are blue,\\\nsugar is sweet\nand soft.\n",
    "headings": "# Title\n\nSo.\n\n## Part\n\nMore.\n\n### Detail\nBelow.\n\n#### Four\n\n##### Five\n\n###### Six\n",
    "setext headings": "Title\n=====\n\nIntro\n\nPart\n----\nText under it.\n",
    "a list": "- apple\n- pear\n- plum\n",
    "a loose list": "* apple\n\n* pear\n\n* plum\n\nThat was all.\n",
    "a numbered list": "1. wash\n2. peel\n3. cook\n\nServe hot.\n",
    "a list that begins later": "Go on:\n\n7. seventh\n8. eighth\n",
    "nested lists": "- fruit\n  - apple\n    - red\n    - green\n  - pear\n- nuts\n  1. walnut\n  2. hazel\n",
    "items of several paragraphs": "1. One.\n\n   More of it.\n\n2. Two.\n\n   > Quoted.\n\nThe end.\n",
    "a task list": "- [ ] write\n- [x] read\n",
    "code": "Look:\n\n```python\ndef f(x):\n\n    return x + 1\n\n\nprint(f(2))\n```\n\nDone.\n",
    "code without an end": "Look:\n\n```\nalpha\n\nbeta\n",
    "tildes": "~~~\n``` not the end\n\nstill\n~~~\n\nout\n",
    "code in code": "````\n```yaml\n\nx = 1\n```\n\ny = 2\n````\n\nout\n",
    "a fence with words inside a fence": "```\n```words are no end\n\ninside\n```\n\noutside\n",
    "code in a list": "- Run:\n\n  ```sh\n  make\n\n  make test\n  ```\n\n- Rest.\n\n```sh\nls\n\npwd\n```\n\nBye.\n",
    "code that opens in an item": "- ```\n  alpha\n  ```\n\nmiddle\n\n```\nbeta\n\ngamma\n```\n\nlast\n",
    "indented code": "So:\n\n    alpha\n\n    beta\n\nAnd on.\n",
    "long code": "```\n"
    + "".join(f"line {n} of the listing, which is long enough to wrap\n" for n in range(60))
    + "```\nEnd.\n",
    "a quote": "> To be, or not.\n>\n> - that\n> - is\n\nSaid he.\n",
    "a lazy quote": "> begun\ngoes on\n#hashtag too\n\nover\n",
    "a table": "| Name | Age |\n|:-----|----:|\n| Ada | 36 |\n| Grace Hopper | 85 |\n\nTwo rows.\n",
    "a wide table": "| "
    + " | ".join(f"column{n}" for n in range(9))
    + " |\n|"
    + "---|" * 9
    + "\n| "
    + " | ".join(f"supercalifragilistic{n}" for n in range(9))
    + " |\n",
    "rules": "above\n\n---\n\nbelow\n\n***\n\nend\n",
    "long words": f"See {'abcdefghij' * 30} for it.\n\nAnd `{'code' * 40}` too.\n",
    "wide characters": "日本語の文章がここにあります。" * 6
    + "\n\n- 一つ目\n- 二つ目 🎈 balloon\n\n家族: 👨‍👩‍👧 ends.\n",
    "emphasis": "This is *soft*, **loud**, ***both***, ~~gone~~ and `code`; 2 * 3 * 4 is 24, snake_case_name stays.\n",
    "links": "Read [the manual](https://example.com/manual?q=1) first.\n\n![A cat](https://example.com/cat.png)\n",
    "link definitions": "See [docs][1] and [more][two].\n\n[1]: https://example.com/a\n[two]: https://example.com/b\n",
    "HTML": "<details>\n<summary>More</summary>\n\nHidden *text*.\n\n</details>\n\nA <b>bold</b> word.\n",
    "deep lists": "".join(f"{'  ' * depth}- level {depth}\n" for depth in range(12)),
    "many blocks": "".join(f"Paragraph {n}: {WORDS}\n\n" for n in range(30)),
    "a long list": "".join(f"- item {n}: {WORDS}\n" for n in range(40)),
    "blank lines": "\n\n\nfirst\n\n\n\n\nsecond\n\n\n",
    "spaces": "  \n   leading\n\n trailing   \n\t\n\tcode by a tab\n",
}
INFO_STRINGS = ("python", "sh")
"""Words after a fence that are not shown, in the answers above."""
