"""Kinds of tasks that need several commands for one thing."""

from __future__ import annotations

from agent_peft.environments.os_interaction.kinds.accounts import A_GROUP, A_USER, THE_GROUP, THE_USER
from agent_peft.environments.os_interaction.kinds.base import Kind, some_lines

KINDS = (
    Kind(
        ("mkdir", "chmod"),
        train=(
            "Create the directory {dir} with the permissions {mode}.",
            "Make a directory {dir} and set its mode to {mode}.",
        ),
        heldout=(
            "Please set up {dir} as a folder of mode {mode}.",
            "There should be a directory {dir} that carries mode {mode}.",
        ),
        init="mkdir -p {dir.parent}",
        gold="mkdir {dir} && chmod {mode} {dir}",
        after="{dir}/",
        check="has %a {mode} {dir}",
    ),
    Kind(
        ("chown", "touch"),
        train=(
            "Create an empty file {file} that belongs to {user}.",
            "Create the empty file {file} and make {user} its owner.",
        ),
        heldout=(
            "Please add a blank {file}, owned by {user}.",
            "{user} should own a new empty file, {file}.",
        ),
        init=f"{A_USER} && mkdir -p {{file.parent}}",
        before=f"{{file.parent}}/ {THE_USER}",
        gold="touch {file} && chown {user} {file}",
        after=f"{{file}} {THE_USER}",
        check="empty {file} && has %u {user.number} {file}",
    ),
    Kind(
        ("groupadd", "usermod"),
        train=(
            "Create the group {group} and add the user {user} to it.",
            "Make a new group {group}; the existing user {user} is to be a member.",
        ),
        heldout=(
            "Please found a group, {group}, that {user} belongs to.",
            "{user} should be in {group}, a group that is still to be set up.",
        ),
        init=A_USER,
        before=THE_USER,
        gold="groupadd {group} && usermod -aG {group} {user}",
        after=f"{THE_USER} group:{{group}}:",
        check="member {user} {group}",
    ),
    Kind(
        ("chgrp", "mkdir", "chmod"),
        train=(
            "Create the directory {dir} for the group {group}, with mode {mode}.",
            "Make a directory {dir} whose group is {group} and whose permissions are {mode}.",
        ),
        heldout=(
            "Please set up a folder {dir} of mode {mode}, owned by the group {group}.",
            "{group} should own, as a group, a new folder {dir} of mode {mode}.",
        ),
        init=f"{A_GROUP} && mkdir -p {{dir.parent}}",
        before=THE_GROUP,
        gold="mkdir {dir} && chgrp {group} {dir} && chmod {mode} {dir}",
        after=f"{{dir}}/ {THE_GROUP}",
        check="has %u:%g:%a 0:{group.number}:{mode} {dir}",
    ),
    Kind(
        ("exit", "echo", "chmod"),
        train=(
            "Create an executable script {script} that exits with code {code}.",
            "Write a bash script {script} with the exit code {code}, and make it executable.",
        ),
        heldout=(
            "Please provide {script}, a script anyone may run, that returns {code}.",
            "{script} should be a runnable script with the exit status {code}.",
        ),
        init="mkdir -p {script.parent}",
        before="{script.parent}/",
        gold="echo '#!/bin/bash' > {script} && echo 'exit {code}' >> {script} && chmod +x {script}",
        after="{script}",
        check="[[ -x {script} ]]",
        runs="returns {code} {script}",
    ),
    Kind(
        ("cp", "chmod"),
        train=(
            "Copy {file} to {file2} and set the permissions of the copy to {mode}.",
            "Make a copy of {file} at {file2} with mode {mode}.",
        ),
        heldout=(
            "Please duplicate {file} as {file2}, which is to have mode {mode}.",
            "{file2} should be a duplicate of {file}, of mode {mode}.",
        ),
        init="mkdir -p {file.parent} {file2.parent} && echo '{text}' > {file} && chmod 604 {file}",
        before="{file} {file2.parent}/",
        gold="cp {file} {file2} && chmod {mode} {file2}",
        after="{file} {file2}",
        check="lines {file} '{text}' && lines {file2} '{text}' && has %a {mode} {file2} && has %a 604 {file}",
        kept="lines {file} '{text}'",
    ),
    Kind(
        ("grep", "wc"),
        train=(
            "Search {file} for {word} and write how many lines match to {file2}.",
            'Use grep and wc to save the number of lines of {file} with "{word}" in {file2}.',
        ),
        heldout=(
            "Please let {file2} tell on how many of its lines {file} mentions {word}.",
            "{file2} should hold the count of {file}'s lines that have {word}.",
        ),
        init="mkdir -p {file.parent} {file2.parent} && printf '%s\\n' {lines} > {file}",
        before="{file} {file2.parent}/",
        gold="grep {word} {file} | wc -l > {file2}",
        after="{file} {file2}",
        check="lines {file} {lines} && number {file2} {hits} {file}",
        kept="lines {file} {lines}",
        draw=some_lines,
    ),
    Kind(
        ("mv", "mkdir"),
        train=(
            "Create the directory {dir} and move {file} into it.",
            "Make a new directory {dir}, then move the file {file} there.",
        ),
        heldout=(
            "Please set up {dir} as the new home of {file}.",
            "{file} belongs in {dir}, a folder that is still to be set up.",
        ),
        init="mkdir -p {file.parent} {dir.parent} && echo '{text}' > {file}",
        before="{file}",
        gold="mkdir {dir} && mv {file} {dir}",
        after="{file.parent}/ {dir}/{file.name}",
        check="lines {dir}/{file.name} '{text}'",
        kept="lines {file} '{text}'",
    ),
    Kind(
        ("useradd", "mkdir", "chown"),
        train=(
            "Create the user {user} and a directory {dir} that belongs to this user.",
            "Add a user {user}, create {dir}, and make {user} its owner.",
        ),
        heldout=(
            "Please open an account for {user} and a folder {dir} owned by it.",
            "{user}, a user still to be added, should own a new folder {dir}.",
        ),
        init="mkdir -p {dir.parent}",
        gold="useradd {user} && mkdir {dir} && chown {user} {dir}",
        after="{dir}/ user:{user}:",
        check='has %u "${{field[user:{user}:3]}}" {dir}',
    ),
    Kind(
        ("tee", "echo", "cat"),
        train=(
            'Write "{text}" to {file} with tee, then append the contents of {file2} to it.',
            'Use tee to put "{text}" into {file}, and add what is in {file2} below.',
        ),
        heldout=(
            "Please let {file} say: {text}, and after that what {file2} holds.",
            "{file} should begin with the line: {text}; {file2} follows below.",
        ),
        init="mkdir -p {file.parent} {file2.parent} && echo '{text2}' > {file2}",
        before="{file2} {file.parent}/",
        gold="echo '{text}' | tee {file} && cat {file2} >> {file}",
        after="{file} {file2}",
        check="lines {file2} '{text2}' && lines {file} '{text}' '{text2}'",
        kept="lines {file2} '{text2}'",
    ),
)
