"""Kinds of tasks about finding, counting and changing lines of files."""

from __future__ import annotations

from agent_peft.environments.os_interaction.kinds.base import Kind, some_columns, some_lines

# {file} to read, {file2} to write
_OUTPUT = "mkdir -p {file.parent} {file2.parent} && printf '%s\\n' {lines} > {file}"
_SOURCE = "{file} {file2.parent}/"  # which that makes
_INPUT = "mkdir -p {file.parent} && printf '%s\\n' {lines} > {file}"
_SEARCHED = "{dir}/{name} {dir}/{name2} {dir}/{name3}"
_SEARCHED_LINES = (
    "lines {dir}/{name} '{word} {text}' && lines {dir}/{name2} {word2} "
    "&& lines {dir}/{name3} '{word3} {word}'"
)

KINDS = (
    Kind(
        ("grep",),
        train=(
            'Write all lines of {file} that contain "{word}" to {file2}.',
            'Save the lines of {file} with the word "{word}" in {file2}.',
            'Find the lines that contain "{word}" in {file} and write them to {file2}.',
            "Search {file} for {word} and save the matching lines in {file2}.",
        ),
        heldout=(
            "Please copy to {file2} just those lines of {file} in which {word} occurs.",
            "{file2} should hold every line of {file} that mentions {word}.",
            "From {file}, I want whatever mentions {word} put in {file2}.",
        ),
        init=_OUTPUT,
        before=_SOURCE,
        gold="grep {word} {file} > {file2}",
        after="{file} {file2}",
        check="lines {file} {lines} && lines {file2} {matching}",
        kept="lines {file} {lines}",
        draw=some_lines,
    ),
    Kind(
        ("grep",),
        train=(
            'Write all lines of {file} that do not contain "{word}" to {file2}.',
            'Save the lines of {file} without the word "{word}" in {file2}.',
            "Leave out the lines of {file} that contain {word}, and write the rest to {file2}.",
        ),
        heldout=(
            "Please copy to {file2} just those lines of {file} in which {word} does not occur.",
            "{file2} should hold {file} but for the lines that mention {word}.",
        ),
        init=_OUTPUT,
        before=_SOURCE,
        gold="grep -v {word} {file} > {file2}",
        after="{file} {file2}",
        check="lines {file} {lines} && lines {file2} {others}",
        kept="lines {file} {lines}",
        draw=some_lines,
    ),
    Kind(
        ("grep",),
        train=(
            'Count the lines of {file} that contain "{word}" and write the number to {file2}.',
            "Write how many lines of {file} contain {word} to {file2}.",
            'Save the number of lines with "{word}" in {file} to {file2}.',
        ),
        heldout=(
            "Please note in {file2} on how many lines of {file} {word} occurs.",
            "{file2} should hold one number: that of {file}'s lines that mention {word}.",
        ),
        init=_OUTPUT,
        before=_SOURCE,
        gold="grep -c {word} {file} > {file2}",
        after="{file} {file2}",
        check="lines {file} {lines} && number {file2} {hits} {file}",
        kept="lines {file} {lines}",
        draw=some_lines,
    ),
    Kind(
        ("sed",),
        train=(
            'Replace every "{word}" with "{word2}" in {file}.',
            "In {file}, change all occurrences of {word} to {word2}.",
            "Replace {word} by {word2} throughout the file {file}.",
            "Use sed to replace {word} with {word2} in {file}.",
        ),
        heldout=(
            "Please put {word2} wherever {file} says {word}.",
            "{file} should say {word2} instead of {word}.",
            "Wherever {word} stands in {file}, I want {word2}.",
        ),
        init=_INPUT,
        before="{file}",
        gold="sed -i 's/{word}/{word2}/g' {file}",
        check="lines {file} {replaced}",
        kept="lines {file} {lines}",
        draw=some_lines,
    ),
    Kind(
        ("sed",),
        train=(
            'Delete all lines that contain "{word}" from {file}.',
            "Remove the lines with {word} from {file}.",
            "In {file}, delete every line that contains {word}.",
        ),
        heldout=(
            "Please rid {file} of the lines that mention {word}.",
            "No line of {file} should mention {word}; drop those that do.",
        ),
        init=_INPUT,
        before="{file}",
        gold="sed -i '/{word}/d' {file}",
        check="lines {file} {others}",
        kept="lines {file} {lines}",
        draw=some_lines,
    ),
    Kind(
        ("sed",),
        train=(
            "Write line {line_number} of {file} to {file2}.",
            "Save only line number {line_number} of {file} in {file2}.",
            "Extract line {line_number} from {file} into {file2}.",
        ),
        heldout=(
            "Please let {file2} hold what stands on line {line_number} of {file}.",
            "{file2} should be just the line with number {line_number} in {file}.",
        ),
        init=_OUTPUT,
        before=_SOURCE,
        gold="sed -n '{line_number}p' {file} > {file2}",
        after="{file} {file2}",
        check="lines {file} {lines} && lines {file2} {chosen_line}",
        kept="lines {file} {lines}",
        draw=some_lines,
    ),
    Kind(
        ("awk",),
        train=(
            "Write the {ordinal} column of {file} to {file2}.",
            "Save the {ordinal} word of every line of {file} in {file2}.",
            "Extract the {ordinal} column from {file} into {file2}.",
            "Use awk to write column {column} of {file} to {file2}.",
        ),
        heldout=(
            "Please let {file2} hold just column number {column} of {file}.",
            "{file2} should have what stands {ordinal} on each line of {file}.",
        ),
        init=_OUTPUT,
        before=_SOURCE,
        gold="awk '{{print ${column}}}' {file} > {file2}",
        after="{file} {file2}",
        check="lines {file} {lines} && lines {file2} {cells}",
        kept="lines {file} {lines}",
        draw=some_columns,
    ),
    Kind(
        ("awk",),
        train=(
            "Write the {ordinal} column of the comma-separated file {file} to {file2}.",
            "The columns of {file} are separated by commas. Save column {column} in {file2}.",
            "Extract column {column} of {file}, where commas separate the columns, into {file2}.",
        ),
        heldout=(
            "Please let {file2} hold what stands {ordinal} on each line of {file}, between its commas.",
            "{file} has commas between its cells; column {column} should go to {file2}.",
        ),
        init=_OUTPUT.replace("{lines}", "{commas}"),
        before=_SOURCE,
        gold="awk -F, '{{print ${column}}}' {file} > {file2}",
        after="{file} {file2}",
        check="lines {file} {commas} && lines {file2} {cells}",
        kept="lines {file} {commas}",
        draw=some_columns,
    ),
    Kind(
        ("awk",),
        train=(
            "Add up the numbers in the third column of {file} and write the sum to {file2}.",
            "Write the sum of column 3 of {file} to {file2}.",
            "Compute the total of the third column of {file} and save it in {file2}.",
        ),
        heldout=(
            "Please note in {file2} what the numbers of {file}'s last column come to.",
            "{file2} should hold one number, the total of column three in {file}.",
        ),
        init=_OUTPUT,
        before=_SOURCE,
        gold="awk '{{s += $3}} END {{print s}}' {file} > {file2}",
        after="{file} {file2}",
        check="lines {file} {lines} && number {file2} {total} {file}",
        kept="lines {file} {lines}",
        draw=some_columns,
    ),
    Kind(
        ("wc",),
        train=(
            "Count the lines of {file} and write the number to {file2}.",
            "Write the number of lines in {file} to {file2}.",
            "Save the line count of {file} in {file2}.",
            "How many lines does {file} have? Write the number to {file2}.",
        ),
        heldout=(
            "Please note in {file2} how many lines {file} runs to.",
            "{file2} should hold one number, that of the lines of {file}.",
            "I want to read in {file2} how many lines {file} has.",
        ),
        init=_OUTPUT,
        before=_SOURCE,
        gold="wc -l < {file} > {file2}",
        after="{file} {file2}",
        check="lines {file} {lines} && number {file2} {line_count} {file}",
        kept="lines {file} {lines}",
        draw=some_lines,
    ),
    Kind(
        ("wc",),
        train=(
            "Count the words of {file} and write the number to {file2}.",
            "Write the number of words in {file} to {file2}.",
            "Save the word count of {file} in {file2}.",
        ),
        heldout=(
            "Please note in {file2} how many words {file} runs to.",
            "{file2} should hold one number, that of the words of {file}.",
        ),
        init=_OUTPUT,
        before=_SOURCE,
        gold="wc -w < {file} > {file2}",
        after="{file} {file2}",
        check="lines {file} {lines} && number {file2} {word_count} {file}",
        kept="lines {file} {lines}",
        draw=some_lines,
    ),
    Kind(
        ("wc",),
        train=(
            "Count the bytes of {file} and write the number to {file2}.",
            "Write the size of {file} in bytes to {file2}.",
            "Save the number of bytes in {file} to {file2}.",
        ),
        heldout=(
            "Please note in {file2} how many bytes {file} takes.",
            "{file2} should hold one number, the bytes of {file}.",
        ),
        init=_OUTPUT,
        before=_SOURCE,
        gold="wc -c < {file} > {file2}",
        after="{file} {file2}",
        check="lines {file} {lines} && number {file2} {byte_count} {file}",
        kept="lines {file} {lines}",
        draw=some_lines,
    ),
    Kind(
        ("vi",),
        train=(
            'With vi, replace every "{word}" with "{word2}" in {file}.',
            "Use vi, without a terminal, to change all occurrences of {word} to {word2} in {file}.",
            "Edit {file} with vi in ex mode: replace {word} by {word2} everywhere.",
        ),
        heldout=(
            "Please edit {file} (vi -es will do) so that it says {word2} and never {word}.",
            "By a vi command, put {word2} wherever {file} has {word}.",
        ),
        init=_INPUT,
        before="{file}",
        gold="vi -es -c '%s/{word}/{word2}/g' -c 'wq' {file}",
        check="lines {file} {replaced}",
        kept="lines {file} {lines}",
        draw=some_lines,
    ),
    Kind(
        ("vi",),
        train=(
            'With vi, delete all lines that contain "{word}" from {file}.',
            "Use vi, without a terminal, to remove the lines with {word} from {file}.",
            "Edit {file} with vi in ex mode: delete every line that contains {word}.",
        ),
        heldout=(
            "Please edit {file} (vi -es will do) so that no line mentions {word}.",
            "By a vi command, drop from {file} the lines that mention {word}.",
        ),
        init=_INPUT,
        before="{file}",
        gold="vi -es -c 'g/{word}/d' -c 'wq' {file}",
        check="lines {file} {others}",
        kept="lines {file} {lines}",
        draw=some_lines,
    ),
    Kind(
        ("grep",),
        train=(
            "Write the full paths of the files in {dir} that contain {word} to {file}.",
            'Find which files in {dir} contain "{word}", and save their full paths in {file}, one per line.',
            "List in {file} the full path of every file in {dir} that contains the word {word}.",
        ),
        heldout=(
            "Please note in {file} which of {dir}'s files mention {word}, by absolute path.",
            "{file} should name, with full paths, the files of {dir} in which {word} occurs.",
        ),
        init="mkdir -p {file.parent} {dir} && cd {dir} && "
        "echo '{word} {text}' > {name} && echo '{word2}' > {name2} && echo '{word3} {word}' > {name3}",
        before=f"{{file.parent}}/ {_SEARCHED}",
        gold="grep -l {word} {dir}/* > {file}",
        after=f"{{file}} {_SEARCHED}",
        check=f"words {{file}} {{hit_paths}} && {_SEARCHED_LINES}",
        kept=_SEARCHED_LINES,
        draw=lambda slots: slots.update(
            hit_paths=f"{slots['dir']}/{slots['name']} {slots['dir']}/{slots['name3']}"
        ),
    ),
)
