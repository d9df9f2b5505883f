"""Grammars to walk: hand-made ones, each for something that could go wrong, and generators of random ones."""

from __future__ import annotations

import random


def _object(properties: dict, **more) -> dict:
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}


PERSON = _object(
    {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 2, "maxItems": 3},
    },
    required=["name", "age", "tags"],
)
TREE = {
    "$defs": {
        "node": _object(
            {"v": {"type": ["string", "number", "null"]}, "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            required=["v"],
        )
    },
    "$ref": "#/$defs/node",
}
UNION = {
    "anyOf": [
        _object({"kind": {"const": "circle"}, "r": {"type": "number"}}, required=["kind", "r"]),
        _object({"kind": {"const": "circles"}, "n": {"type": "integer"}}, required=["kind", "n"]),
        _object({"kind": {"enum": ["square", "squares"]}, "a": {"type": "boolean"}}, required=["kind"]),
        {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}},
    ]
}
OPTIONAL = _object({f"field{i}": {"type": ["string", "integer", "boolean"][i % 3]} for i in range(9)})
NESTED = {
    "type": "array",
    "maxItems": 200,
    "items": {"type": "array", "maxItems": 150, "items": {"enum": [1, 11, "a"]}},
}

HAND_MADE = {
    "bounded strings": ("schema", PERSON),
    "any object": ("schema", {"type": "object"}),
    "recursion": ("schema", TREE),
    "unions with shared prefixes": ("schema", UNION),
    "everything optional": ("schema", OPTIONAL),
    "maxLength 300": ("schema", _object({"c": {"type": "string", "maxLength": 300}}, required=["c"])),
    "minLength 200": ("schema", _object({"c": {"type": "string", "minLength": 200}}, required=["c"])),
    "between 150 and 170": ("schema", {"type": "string", "minLength": 150, "maxLength": 170}),
    "maxLength 100000": ("schema", {"type": "string", "maxLength": 100_000}),
    "counted arrays of counted arrays": ("schema", NESTED),
    "patterns": (
        "schema",
        _object(
            {"d": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}$"}, "e": {"format": "email", "type": "string"}}
        ),
    ),
    "bounds on numbers": ("schema", {"type": "array", "items": {"type": "integer", "minimum": -37, "maximum": 12345}}),
    "numbers": ("schema", {"type": "array", "items": {"type": "number", "minimum": 0.5, "maximum": 20.25}}),
    "an enum of 400": ("schema", {"enum": [f"{i * i}-value {i}" for i in range(400)]}),
    "const with escapes": ("schema", {"const": 'a"\\\n\t é 日本 😀 end'}),
    "map of strings": ("schema", {"type": "object", "additionalProperties": {"type": "string", "maxLength": 4}}),
    "unicode classes": ("regex", "[à-ÿ日-本😀-😎]{2,7}(é|日本|😀)*"),
    "counted regex": ("regex", "(ab|a){3,9}b{140,400}(xy)+"),
    "choices": ("regex", "(yes|no|maybe|mayb)"),
    "negated class": ("regex", '[^"\\\\]{0,300}"'),
    "a regex that may be empty": ("regex", "(a?b?c?)*"),
    "phone": ("regex", "(\\+[0-9]{1,3} )?[0-9]{3}-[0-9]{4}"),
    "palindromes": ("ebnf", 'root ::= "a" root "a" | "b" root "b" | "a" | "b" | ""'),
    "brackets": ("ebnf", 'root ::= s\ns ::= "(" s ")" s | "[" s "]" s | ""'),
    "arithmetic": ("ebnf", 'root ::= e\ne ::= t ("+" t)*\nt ::= f ("*" f)*\nf ::= [0-9]+ | "(" e ")"'),
    "ambiguous": ("ebnf", 'root ::= (a | b | ab)+\na ::= "a"\nb ::= "b"\nab ::= "ab" | a b'),
    "words": ("ebnf", 'root ::= word (" " word)*\nword ::= [a-zA-Zà-ÿ]+'),
    "counted rules": ("ebnf", 'root ::= "x" (pair){130,500} "y"\npair ::= "a" | "b" [0-9]'),
    "two counts at once": ("ebnf", 'root ::= (x){150,700} | (y){200,900} "!"\nx ::= "a" | "ab"\ny ::= "a" | "b"'),
    "counts inside counts": ("ebnf", 'root ::= (row){2,400}\nrow ::= (cell){130,300} "\\n"\ncell ::= [ab]'),
    "a count that recurs": ("ebnf", 'root ::= "(" (item){0,200} ")"\nitem ::= "a" | root'),
    "exactly 333": ("ebnf", "root ::= [a-c]{333}"),
    "nullable rules": ("ebnf", 'root ::= a b c "."\na ::= "a" | ""\nb ::= "b"* \nc ::= a b | "c"'),
    "no rule can end": ("ebnf", 'root ::= "a" root'),
    "mutual recursion": ("ebnf", 'root ::= a\na ::= "a" b | "."\nb ::= "b" a | "a" "!"'),
    "a star behind a call": ("ebnf", 'root ::= x [0-9]* | y\nx ::= "a" x | "."\ny ::= "q" x [a-c]*'),
    "dates": ("ebnf", 'root ::= d "/" d "/" d d\nd ::= [0-9] | [0-9] [0-9]'),
    "tags in text": (
        "tag",
        {
            "type": "structural_tag",
            "format": {
                "type": "triggered_tags",
                "triggers": ["<f"],
                "tags": [{"begin": "<f>", "content": {"type": "json_schema", "json_schema": OPTIONAL}, "end": "</f>"}],
            },
        },
    ),
}

DECLINED = {
    "left recursion": ("ebnf", 'root ::= root "a" | "b"'),
    "hidden left recursion": ("ebnf", 'root ::= e root "a" | "b"\ne ::= "" | "x"'),
}


def random_schema(random_: random.Random, depth: int = 3) -> dict:
    """A JSON schema, most of the time of several levels."""
    scalar = depth == 0 or random_.random() < 0.3
    kind = random_.choice(
        ["string", "integer", "number", "enum", "const"] if scalar else ["object"] * 3 + ["array", "any"]
    )
    if kind == "string":
        low = random_.choice([0, 0, 0, 1, 5, 130, 200])
        limits = {"minLength": low} if low and random_.random() < 0.5 else {}
        if random_.random() < 0.5:
            limits["maxLength"] = low + random_.choice([1, 3, 12, 60, 140, 400])
        return {"type": "string", **limits}
    if kind == "integer":
        return {
            "type": "integer",
            **({"minimum": -5, "maximum": random_.randrange(6, 5000)} if random_.random() < 0.5 else {}),
        }
    if kind == "number":
        return {"type": random_.choice(["number", "boolean", "null"])}
    if kind == "enum":
        return {
            "enum": [
                random_.choice(["a", "ab", "é", "日本", 'q"', "", "abc"]) + str(i)
                for i in range(random_.randrange(1, 9))
            ]
        }
    if kind == "const":
        return {"const": random_.choice([None, True, 12, "x\ny", ["a", 1], {"a": {}}])}
    if kind == "array":
        counts = random_.choice(
            [{}, {}, {"maxItems": 3}, {"minItems": 2}, {"minItems": 1, "maxItems": 140}, {"maxItems": 300}]
        )
        return {"type": "array", "items": random_schema(random_, depth - 1), **counts}
    if kind == "any":
        return {"anyOf": [random_schema(random_, depth - 1) for _ in range(random_.randrange(2, 4))]}
    names = random_.sample(["a", "ab", "abc", "b", "name", "é", "name2", 'q"'], random_.randrange(1, 6))
    schema = {"type": "object", "properties": {name: random_schema(random_, depth - 1) for name in names}}
    schema["required"] = [name for name in names if random_.random() < 0.5]
    if random_.random() < 0.7:
        schema["additionalProperties"] = random_.choice([False, {"type": "integer"}])
    return schema


def random_regex(random_: random.Random, depth: int = 3) -> str:
    """A regular expression over letters, classes and split code points, with counts."""
    if depth == 0:
        return random_.choice(["a", "b", "ab", "[a-c]", "[^a]", "[0-9]", "é", "[à-ÿ]", "日", "[日-本]", "😀", "x"])
    parts = [random_regex(random_, depth - 1) for _ in range(random_.randrange(1, 4))]
    body = "|".join(parts) if random_.random() < 0.4 else "".join(parts)
    counts = ["", "", "?", "*", "+", "{2}", "{1,3}", "{0,5}", "{3,}"]
    if depth == 1:
        counts += ["{140}", "{130,200}", "{0,300}"]
    return f"({body}){random_.choice(counts)}"


def random_ebnf(random_: random.Random) -> str:
    """Rules that call each other at random, each alternative but the first beginning with a byte or being empty."""
    names = ["root", "p", "q", "r", "s"][: random_.randrange(2, 6)]

    def element() -> str:
        pick = random_.random()
        if pick < 0.45:
            return random_.choice(['"a"', '"b"', '"ab"', "[a-c]", "[0-9]", '"é"', "[^a-z]", '"\\""'])
        if pick < 0.8:
            return random_.choice(names)
        if pick < 0.9:
            return f"({random_.choice(names)}){random_.choice(['?', '*', '+'])}"
        return f'("a" {random_.choice(names)}){random_.choice(["{2,4}", "{0,200}", "{135,300}"])}'

    rules = []
    for name in names:
        alternatives = ['"' + random_.choice("abx") + '"']
        for _ in range(random_.randrange(1, 4)):
            first = random_.choice(['"a"', '"b"', "[a-z]", '"("', '"1"'])
            alternatives.append(" ".join([first, *(element() for _ in range(random_.randrange(0, 4)))]))
        if random_.random() < 0.25:
            alternatives.append('""')
        if random_.random() < 0.3:
            alternatives.append(random_.choice(names))
        rules.append(f"{name} ::= {' | '.join(alternatives)}")
    return "\n".join(rules)
