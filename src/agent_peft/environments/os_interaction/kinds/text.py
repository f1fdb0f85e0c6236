"""Kinds of tasks about writing and joining files."""

from __future__ import annotations

from agent_peft.environments.os_interaction.kinds.base import Kind

KINDS = (
    Kind(
        ("echo",),
        train=(
            'Write the text "{text}" to {file}.',
            'Create {file} with the text "{text}".',
            'Save "{text}" in the file {file}.',
            'Put the words "{text}" into {file}.',
        ),
        heldout=(
            "Please let {file} say: {text}",
            "{file} should read: {text}",
            "I want a file {file} whose only line is: {text}",
        ),
        init="mkdir -p {file.parent}",
        before="{file.parent}/",
        gold="echo '{text}' > {file}",
        after="{file}",
        check="lines {file} '{text}'",
    ),
    Kind(
        ("echo",),
        train=(
            'Append the line "{text}" to {file}.',
            'Add the line "{text}" at the end of {file}.',
            'Append "{text}" to the file {file}, keeping what is there.',
        ),
        heldout=(
            "Please let {file} end with one more line: {text}",
            "{file} lacks a last line, which reads: {text}",
        ),
        init="mkdir -p {file.parent} && echo '{text2}' > {file}",
        before="{file}",
        gold="echo '{text}' >> {file}",
        check="lines {file} '{text2}' '{text}'",
        kept="lines {file} '{text2}'",
    ),
    Kind(
        ("cat",),
        train=(
            "Concatenate {dir}/{name} and {dir}/{name2} into {file}.",
            "Join the files {dir}/{name} and {dir}/{name2}, in this order, into {file}.",
            "Write the contents of {dir}/{name} followed by those of {dir}/{name2} to {file}.",
        ),
        heldout=(
            "Please merge {dir}/{name} and then {dir}/{name2} to give {file}.",
            "{file} should consist of {dir}/{name} with {dir}/{name2} after it.",
        ),
        init="mkdir -p {dir} {file.parent} && echo '{text}' > {dir}/{name} && echo '{text2}' > {dir}/{name2}",
        before="{dir}/{name} {dir}/{name2} {file.parent}/",
        gold="cat {dir}/{name} {dir}/{name2} > {file}",
        after="{dir}/{name} {dir}/{name2} {file}",
        check="lines {dir}/{name} '{text}' && lines {dir}/{name2} '{text2}' && lines {file} '{text}' "
        "'{text2}'",
        kept="lines {dir}/{name} '{text}' && lines {dir}/{name2} '{text2}'",
    ),
    Kind(
        ("cat",),
        train=(
            "Append the contents of {file} to {file2}.",
            "Add everything in {file} to the end of {file2}.",
            "Append the file {file} to the file {file2}.",
        ),
        heldout=(
            "Please let {file2} go on with what {file} holds.",
            "What {file} says should stand once more, below the last line of {file2}.",
        ),
        init="mkdir -p {file.parent} {file2.parent} && echo '{text}' > {file} && echo '{text2}' > {file2}",
        before="{file} {file2}",
        gold="cat {file} >> {file2}",
        check="lines {file} '{text}' && lines {file2} '{text2}' '{text}'",
        kept="lines {file} '{text}' && lines {file2} '{text2}'",
    ),
    Kind(
        ("tee", "echo"),
        train=(
            'Write "{text}" to both {file} and {file2}.',
            'Use tee to save the text "{text}" in {file} and {file2}.',
            'Put the text "{text}" into the two files {file} and {file2}.',
        ),
        heldout=(
            "Please let {file} and {file2} alike say: {text}",
            "Two files, {file} and {file2}, should each read: {text}",
        ),
        init="mkdir -p {file.parent} {file2.parent}",
        before="{file.parent}/ {file2.parent}/",
        gold="echo '{text}' | tee {file} {file2}",
        after="{file} {file2}",
        check="lines {file} '{text}' && lines {file2} '{text}'",
    ),
    Kind(
        ("tee", "echo"),
        train=(
            'Append the line "{text}" to both {dir}/{name} and {dir}/{name2}.',
            'Use tee to add the line "{text}" to {dir}/{name} and {dir}/{name2}.',
            'Add "{text}" as a last line to {name} and to {name2} in {dir}.',
        ),
        heldout=(
            "Please let {name} and {name2} in {dir} both end with one more line: {text}",
            "{dir}/{name} and {dir}/{name2} lack the same last line: {text}",
        ),
        init="mkdir -p {dir} && echo '{text2}' > {dir}/{name} && echo '{text3}' > {dir}/{name2}",
        before="{dir}/{name} {dir}/{name2}",
        gold="echo '{text}' | tee -a {dir}/{name} {dir}/{name2}",
        check="lines {dir}/{name} '{text2}' '{text}' && lines {dir}/{name2} '{text3}' '{text}'",
        kept="lines {dir}/{name} '{text2}' && lines {dir}/{name2} '{text3}'",
    ),
)
