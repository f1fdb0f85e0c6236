"""Kinds of tasks about what is in folders."""

from __future__ import annotations

from agent_peft.environments.os_interaction.kinds.base import Kind, a_folder_of_files

KINDS = (
    Kind(
        ("ls",),
        train=(
            "List the names in {dir} and save the list to {file}.",
            "Write the names of everything in {dir} to {file}, one per line.",
            "Save the output of ls for {dir} in {file}.",
        ),
        heldout=(
            "Please note down in {file} what {dir} contains, a name per line.",
            "{file} should list the entries of {dir}.",
        ),
        init="mkdir -p {file.parent} {sub} && touch {found} {rest}",
        before="{file.parent}/ {found} {rest}",
        gold="ls {dir} > {file}",
        after="{file} {found} {rest}",
        check="words {file} {entries}",
        draw=a_folder_of_files,
    ),
    Kind(
        ("ls",),
        train=(
            "List all names in {dir}, the hidden ones too, and save the list to {file}.",
            "Write the names of everything in {dir}, including hidden files, to {file}, one per line.",
            "Save the names in {dir}, with those that begin with a dot, in {file}.",
        ),
        heldout=(
            "Please note down in {file} what {dir} contains, dot files as well.",
            "{file} should list the entries of {dir}, none hidden from it.",
        ),
        init="mkdir -p {file.parent} {dir} && touch {dir}/.{stem} {dir}/{name} {dir}/{name2}",
        before="{file.parent}/ {dir}/.{stem} {dir}/{name} {dir}/{name2}",
        gold="ls -A {dir} > {file}",
        after="{file} {dir}/.{stem} {dir}/{name} {dir}/{name2}",
        check="words {file} .{stem} {name} {name2}",
    ),
    Kind(
        ("find",),
        train=(
            "Find all .{ext} files under {dir} and write their full paths to {file}.",
            "Search {dir} and its subdirectories for files that end in .{ext}, and save their full paths "
            "in {file}, one per line.",
            "Save the full path of every .{ext} file below {dir} to {file}.",
        ),
        heldout=(
            "Please collect in {file} the absolute paths of whatever .{ext} files lie anywhere in {dir}.",
            "{file} should name each .{ext} file in {dir}'s tree by its full path.",
        ),
        init="mkdir -p {file.parent} {sub} && touch {found} {rest}",
        before="{file.parent}/ {found} {rest}",
        gold="find {dir} -name '*.{ext}' > {file}",
        after="{file} {found} {rest}",
        check="words {file} {found}",
        draw=a_folder_of_files,
    ),
    Kind(
        ("find",),
        train=(
            "Find and delete all .{ext} files under {dir}.",
            "Delete every file that ends in .{ext} in {dir} and its subdirectories.",
            "Remove all .{ext} files anywhere below {dir}.",
        ),
        heldout=(
            "Please clear the whole tree of {dir} of .{ext} files.",
            "No .{ext} file should be left in {dir}, at any depth.",
        ),
        init="mkdir -p {sub} && touch {found} {rest}",
        before="{found} {rest}",
        gold="find {dir} -name '*.{ext}' -delete",
        after="{rest}",
        draw=a_folder_of_files,
    ),
)
