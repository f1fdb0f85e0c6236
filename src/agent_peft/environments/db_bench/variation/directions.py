"""Other directions, comparisons and functions."""

from __future__ import annotations

import random
import re
from collections import Counter

from sqlglot import exp

from agent_peft.environments.db_bench.variation.question import Question

_OTHER_WAYS = re.compile(r"\b(before|after|older|newer|earlier|later|since|least|most)\b|[<>]")  # to compare
_MORE = {
    "greater than": "less than",
    "more than": "fewer than",
    "higher than": "lower than",
    "exceeding": "below",
    "exceeds": "is below",
    "exceed": "are below",
    "above": "below",
    "over": "under",
}
_LESS = {
    "less than": "greater than",
    "fewer than": "more than",
    "lower than": "higher than",
    "below": "above",
    "under": "over",
}


def turn_round(tree: exp.Expr, question: Question, rng: random.Random) -> None:
    """Sort in another direction, compare the other way round, take another function, where the question has
    one word for each.
    """
    text = question.text
    sorts = list(tree.find_all(exp.Ordered))
    directions = Counter(sort.args["desc"] for sort in sorts if sort.args["desc"] is not None)
    named = [text.count("ascending"), text.count("descending")]
    if rng.random() < 0.5 and named == [directions[False], directions[True]]:
        for sort in sorts:
            if sort.args["desc"] is not None:
                sort.set("desc", not sort.args["desc"])
                sort.set("nulls_first", not sort.args["desc"])
        question.swap({"ascending": "descending", "descending": "ascending"})
    if rng.random() < 0.4 and not _OTHER_WAYS.search(text):
        for kind, opposite, words in ((exp.GT, exp.LT, _MORE), (exp.LT, exp.GT, _LESS)):
            nodes = list(tree.find_all(kind))
            if nodes and len(nodes) == sum(len(re.findall(rf"\b{word}\b", text)) for word in words):
                for node in nodes:
                    node.replace(opposite(this=node.this, expression=node.expression))
                question.swap(words)
                break
    functions = {type(node) for node in tree.find_all(exp.AggFunc)}
    if rng.random() < 0.5 and functions == {exp.Avg} and not re.search(r"\b(total|max|min|mean)", text):
        function, word, short = rng.choice(
            ((exp.Sum, "total", "total"), (exp.Max, "maximum", "max"), (exp.Min, "minimum", "min"))
        )
        for average in list(tree.find_all(exp.Avg)):
            average.replace(function(this=average.this))
        for name in tree.find_all(exp.Identifier):
            name.set("this", re.sub("^(avg|average)_", f"{short}_", name.name))
        question.swap({"an average": f"a {word}", "average": word})
        question.text = re.sub(r"\bavg_", f"{short}_", question.text)
