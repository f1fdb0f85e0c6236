"""How a person may ask for a statement, in two pools that share no template and no wording.

``{columns}``, ``{column}``, ``{key}``, ``{group}``, ``{condition}`` and ``{cells}`` name columns as the table
does; with ``_said`` after it, with spaces instead of underscores. ``{one}`` and ``{many}`` are what rows are
called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Phrasings:
    """The wordings of one split. ``templates`` are per skill, ``comparisons`` per operator (and per operator
    on days), ``directions`` and ``extremes`` per (kind, descending), ``aggregates`` per function.

    >>> TRAIN.extremes["number", True]
    'highest'
    """

    templates: Mapping[str, tuple[str, ...]]
    comparisons: Mapping[str, str]
    day_comparisons: Mapping[str, str]
    directions: Mapping[tuple[str, bool], str]
    extremes: Mapping[tuple[str, bool], str]
    aggregates: Mapping[str, str]


TRAIN = Phrasings(
    templates={
        "insert": (
            "Add a new {one} with {cells_said}.",
            "Insert a row into {table}: {cells}.",
            "Please record a new {one}: {cells_said}.",
            "Insert a new {one} where {cells}.",
            "A new {one} has come in. Save it with {cells_said}.",
            "Put this {one} into the table: {cells}.",
            "Create a new entry in {table} with {cells}.",
            "We have one more {one}, with {cells_said}. Add it to the table.",
        ),
        "update": (
            "Set the {column_said} to {value} for all {many} where the {condition_said}.",
            "Update {table}: set {column} to {value} where {condition}.",
            "Change {column} to {value} for every {one} whose {condition}.",
            "For {many} whose {condition_said}, change the {column_said} to {value}.",
            "Please update the {column_said} to {value} wherever the {condition_said}.",
            "Where {condition}, set {column} to {value}.",
            "The {column_said} should be {value} for each {one} whose {condition_said}. Update the table.",
            "Modify the {many} whose {condition}: their {column} becomes {value}.",
        ),
        "delete": (
            "Delete all {many} where the {condition_said}.",
            "Remove every {one} whose {condition_said}.",
            "Delete the rows of {table} where {condition}.",
            "Remove the rows where {condition} from {table}.",
            "Please delete each {one} whose {condition}.",
            "We no longer need {many} whose {condition_said}. Delete them.",
            "Remove all entries in which the {condition_said}.",
            "Delete from {table} all {many} with this property: {condition}.",
        ),
        "select": (
            "List the {columns_said} of all {many}.",
            "What are the {columns_said} of every {one}? Return {columns}.",
            "Return {columns} for all rows of {table}.",
            "Show me {columns} for each {one}.",
            "I want to see the {columns_said} of all the {many}.",
            "Return the {columns_said} of every row in the table.",
            "Please show {columns} for all {many}.",
            "Select {columns} from {table}.",
        ),
        "where_single_condition": (
            "Which {many} have this property: {condition}? Return {columns}.",
            "Return the {columns_said} of all {many} whose {condition_said}.",
            "List {columns} for every {one} where {condition}.",
            "Show the {columns_said} of the {many} where the {condition_said}.",
            "Find the {many} whose {condition}. Return {columns}.",
            "For {many} whose {condition_said}, what is the {columns_said}?",
            "Return {columns} from {table} where {condition}.",
            "I need the {columns_said} of each {one} whose {condition_said}.",
        ),
        "order_by_single_column": (
            "List the {columns_said} of all {many}, ordered by {key_said} {direction}.",
            "Return {columns} for every {one}, sorted by {key} {direction}.",
            "Show {columns} of all rows in {table}, ordered by {key} {direction}.",
            "Sort the {many} by {key_said} {direction} and return the {columns_said} of each.",
            "What are the {columns_said} of all {many}? Order them by {key_said} {direction}.",
            "Order {table} by {key} {direction} and return {columns}.",
            "Give the {columns_said} of each {one}, ordered {direction} by {key_said}.",
            "Return the {columns_said} of all {many}. The result must be sorted by {key} {direction}.",
        ),
        "limit_only": (
            "Return the {columns_said} of the {count} {many} with the {extreme} {key_said}, starting with the {extreme}.",  # noqa: E501
            "Which {count} {many} have the {extreme} {key}? Return {columns}, {extreme} first.",
            "List {columns} for the {count} rows of {table} with the {extreme} {key}, {extreme} first.",
            "Show the {columns_said} of the {count} {many} that have the {extreme} {key_said}. Begin with the {extreme}.",  # noqa: E501
            "Find the {count} {many} with the {extreme} {key_said} and return {columns}, from the {extreme} on.",  # noqa: E501
            "I want {columns} of only {count} {many}: those with the {extreme} {key}, {extreme} first.",
            "Order the {many} so that the {extreme} {key_said} comes first, and return the {columns_said} of the first {count}.",  # noqa: E501
            "Return {columns}, limited to the {count} {many} with the {extreme} {key}, with the {extreme} at the top.",  # noqa: E501
        ),
        "group_by_single_column": (
            "For each {group_said}, what is the {aggregate_said}? Return {outputs_said}.",
            "Return {outputs} for each {group}.",
            "What is the {aggregate_said} per {group_said}? Return {outputs_said}.",
            "Group the {many} by {group} and return {outputs}.",
            "Show the {aggregate} of every {group}. Return {outputs}.",
            "Per {group_said}, return {outputs_said}.",
            "Summarize {table} by {group}: return {outputs}.",
            "I want to know the {aggregate_said} for every {group_said}. Return {outputs_said}.",
        ),
    },
    comparisons={
        "=": "is",
        ">": "is greater than",
        "<": "is less than",
        ">=": "is at least",
        "<=": "is at most",
    },
    day_comparisons={"=": "is", ">": "is after", "<": "is before"},
    directions={
        ("number", False): "in ascending order",
        ("number", True): "in descending order",
        ("day", False): "from earliest to latest",
        ("day", True): "from latest to earliest",
    },
    extremes={
        ("number", False): "lowest",
        ("number", True): "highest",
        ("day", False): "earliest",
        ("day", True): "latest",
    },
    aggregates={
        "COUNT": "number of {many}",
        "SUM": "total {column}",
        "MAX": "highest {column}",
        "MIN": "lowest {column}",
    },
)

HELDOUT = Phrasings(
    templates={
        "insert": (
            "Store one additional {one} in {table}, having {cells}.",
            "There is another {one} to enter: {cells_said}.",
            "Append to {table} a record with {cells}.",
            "Could you enter one more {one}? Its details: {cells_said}.",
            "Register a further {one} having {cells_said}.",
        ),
        "update": (
            "Make {value} the new {column_said} of any {one} whose {condition_said}.",
            "Could you switch {column} to {value} on rows in which {condition}?",
            "Any {one} whose {condition_said} gets a new {column_said}: {value}.",
            "In {table}, replace {column} with {value} if {condition}.",
            "Correct the {column_said} of {many} whose {condition_said}; it has to be {value}.",
        ),
        "delete": (
            "Erase any {one} whose {condition_said}.",
            "Clear {table} of rows in which {condition}.",
            "Could you drop the {many} whose {condition_said} from our records?",
            "Get rid of {many} if their {condition}.",
            "Take out any entry of {table} for which {condition}.",
        ),
        "select": (
            "Give me an overview of {table} with only {columns}.",
            "Could you print the {columns_said} for the whole table?",
            "Display {columns}, and nothing else, for the {many}.",
            "Fetch the {columns_said} from each row we have.",
            "Tell me the {columns_said} that {table} holds, row by row.",
        ),
        "where_single_condition": (
            "Could you look up {many} whose {condition_said} and tell me the {columns_said}?",
            "Fetch {columns} for any row of {table} in which {condition}.",
            "Tell me {columns} if {condition}.",
            "Give the {columns_said} for those {many} whose {condition_said}.",
            "Display {columns} only for {many} whose {condition}.",
        ),
        "order_by_single_column": (
            "Arrange the {many} by {key_said}, {direction}, and display the {columns_said}.",
            "Fetch {columns} of each row, arranged by {key}, {direction}.",
            "Could you print {columns} of the whole table by {key}, {direction}?",
            "Rank the {many} on {key_said}, {direction}, and tell me their {columns_said}.",
            "Display {table} by {key}, {direction}, with only {columns}.",
        ),
        "limit_only": (
            "Tell me the {columns_said} of just {count} {many}, the ones with the {extreme} {key_said}, the very {extreme} on top.",  # noqa: E501
            "Fetch {columns} of the top {count} of {table} when the {extreme} {key} is put first.",
            "Could you print {columns} of the {count} {many} having the {extreme} {key}, the very {extreme} leading?",  # noqa: E501
            "Rank the {many} with the {extreme} {key_said} leading, keep {count}, and display their {columns_said}.",  # noqa: E501
            "Give only {count} rows, with {columns}: the {many} of {extreme} {key}, the very {extreme} leading.",  # noqa: E501
        ),
        "group_by_single_column": (
            "Break {table} down by {group}, displaying {outputs}.",
            "Could you tell me the {aggregate_said} within each {group_said}? Display {outputs_said}.",
            "Collect the {many} by {group_said} and display {outputs_said}.",
            "Give one line for each {group}, with {outputs}.",
            "Compute the {aggregate_said} by {group_said}, displaying {outputs_said}.",
        ),
    },
    comparisons={
        "=": "equals",
        ">": "exceeds",
        "<": "is below",
        ">=": "is no less than",
        "<=": "is no more than",
    },
    day_comparisons={"=": "equals", ">": "is later than", "<": "is earlier than"},
    directions={
        ("number", False): "smallest first",
        ("number", True): "largest first",
        ("day", False): "oldest first",
        ("day", True): "newest first",
    },
    extremes={
        ("number", False): "smallest",
        ("number", True): "largest",
        ("day", False): "oldest",
        ("day", True): "newest",
    },
    aggregates={
        "COUNT": "count of {many}",
        "SUM": "sum of {column}",
        "MAX": "maximum {column}",
        "MIN": "minimum {column}",
    },
)
