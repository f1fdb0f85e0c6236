"""Kinds of tasks about users, groups and who owns what."""

from __future__ import annotations

import datetime

from agent_peft.environments.os_interaction.kinds.base import Kind, Slots

# Accounts that exist before the agent acts have known numbers. Owners are compared by number, because a name
# may be given to another account.
A_USER, THE_USER = "useradd -u {user.number} {user}", "user:{user}:{user.number} group:{user}:{user.number}"
A_GROUP, THE_GROUP = "groupadd -g {group.number} {group}", "group:{group}:{group.number}"
_BOTH, _THE_BOTH = f"{A_USER} && {A_GROUP}", f"{THE_USER} {THE_GROUP}"
_A_FILE = "mkdir -p {file.parent} && echo {file.name} > {file}"
_A_FOLDER = "mkdir -p {dir}/inner && touch {dir}/{name} {dir}/{name2} {dir}/inner/{name}"
_ITS_FILES = "{dir}/{name} {dir}/{name2} {dir}/inner/{name}"


def _a_date(slots: Slots) -> None:
    """``date``, and ``epoch_days``, which is how /etc/shadow writes it."""
    days = slots.rng.randint(21_200, 23_000)
    slots.update(
        date=(datetime.date(1970, 1, 1) + datetime.timedelta(days)).isoformat(), epoch_days=str(days)
    )


def _another_shell(slots: Slots) -> None:
    """``shell``, and ``old_shell``, which is another."""
    slots["old_shell"] = "/bin/sh" if slots["shell"] == "/bin/bash" else "/bin/bash"


def _new_group(command: str, id_flag: str) -> tuple[Kind, Kind]:
    """addgroup and groupadd are asked for by name: the same wordings with another command would else be
    the same tasks.
    """
    return (
        Kind(
            (command,),
            train=(
                f"Create the group {{group}} with {command}.",
                f"Use {command} to create a group named {{group}}.",
                f"Add a new group called {{group}}, using {command}.",
                f"With {command}, make a group {{group}}.",
            ),
            heldout=(
                f"Please set up {{group}} as a group ({command}).",
                f"A group by the name of {{group}} is missing; {command} can add it.",
            ),
            gold=f"{command} {{group}}",
            after="group:{group}:",
        ),
        Kind(
            (command,),
            train=(
                f"Create the group {{group}} with the group ID {{id}}, using {command}.",
                f"Use {command} to create a group {{group}} whose GID is {{id}}.",
                f"With {command}, make a group named {{group}} that has the ID {{id}}.",
            ),
            heldout=(
                f"Please set up {{group}} as a group numbered {{id}} ({command}).",
                f"GID {{id}} should go to a group {{group}}; {command} can add it.",
            ),
            gold=f"{command} {id_flag} {{id}} {{group}}",
            after="group:{group}:{id}",
        ),
    )


KINDS = (
    *_new_group("addgroup", "--gid"),
    *_new_group("groupadd", "-g"),
    Kind(
        ("useradd",),
        train=(
            "Create a user named {user}.",
            "Add a new user {user}.",
            "Create the user account {user}.",
            "Add the user {user} to the system.",
        ),
        heldout=(
            "Please open an account for {user}.",
            "There should be a user by the name of {user}.",
            "I want {user} to have an account.",
        ),
        gold="useradd {user}",
        after="user:{user}:",
    ),
    Kind(
        ("useradd",),
        train=(
            "Create a user {user} with a home directory.",
            "Add the user {user} and create the home directory /home/{user}.",
            "Create the user account {user}, including its home directory.",
        ),
        heldout=(
            "Please open an account for {user}, with a home under /home.",
            "{user} should be a user who has a home, /home/{user}.",
        ),
        gold="useradd -m {user}",
        after="user:{user}:",
        check="entry user:{user} 6 /home/{user} && [[ ! -L /home && -d /home/{user} && ! -L /home/{user} ]]",
    ),
    Kind(
        ("useradd",),
        train=(
            "Create a user {user} whose login shell is {shell}.",
            "Add the user {user} with the shell {shell}.",
            "Create the user account {user} and give it the login shell {shell}.",
        ),
        heldout=(
            "Please open an account for {user} that logs in to {shell}.",
            "{user} should be a user with {shell} for a shell.",
        ),
        gold="useradd -s {shell} {user}",
        after="user:{user}:",
        check="entry user:{user} 7 {shell}",
    ),
    Kind(
        ("useradd",),
        train=(
            "Create a user {user} with the user ID {id}.",
            "Add the user {user} with UID {id}.",
            "Create the user account {user}; its UID is {id}.",
        ),
        heldout=(
            "Please open an account for {user}, numbered {id}.",
            "UID {id} should belong to a user {user}.",
        ),
        gold="useradd -u {id} {user}",
        after="user:{user}:{id}",
    ),
    Kind(
        ("usermod",),
        train=(
            "Add the user {user} to the group {group}.",
            "Make {user} a member of the group {group}.",
            "Put the user {user} into the group {group}.",
            "The user {user} should be in the group {group}. Add them.",
        ),
        heldout=(
            "Please let {user} join {group}.",
            "{group} should count {user} among its members.",
            "I want {user} to belong to {group} as well.",
        ),
        init=_BOTH,
        before=_THE_BOTH,
        gold="usermod -aG {group} {user}",
        check="member {user} {group}",
        kept="! member {user} {group}",
    ),
    Kind(
        ("usermod",),
        train=(
            'Set the comment of the user {user} to "{text}".',
            'Change the comment field of {user} to "{text}".',
            'Give the account {user} the comment "{text}".',
        ),
        heldout=(
            "Please let the account of {user} bear the comment: {text}",
            "{user}'s comment (GECOS) should read: {text}",
        ),
        init=A_USER,
        before=THE_USER,
        gold="usermod -c '{text}' {user}",
        check="entry user:{user} 5 '{text}'",
        kept="entry user:{user} 5 ''",
    ),
    Kind(
        ("usermod",),
        train=(
            "Rename the user {user2} to {user}.",
            "Change the login name of {user2} to {user}.",
            "Give the user {user2} the new login name {user}.",
        ),
        heldout=(
            "Please let the account {user2} be called {user}.",
            "{user2} should from now on log in as {user}.",
        ),
        init="useradd -u {user2.number} {user2}",
        before="user:{user2}:{user2.number}",
        gold="usermod -l {user} {user2}",
        after="user:{user}:{user2.number}",
    ),
    Kind(
        ("gpasswd",),
        train=(
            "Use gpasswd to add the user {user} to the group {group}.",
            "With gpasswd, make {user} a member of {group}.",
            "Add {user} to {group} with the gpasswd command.",
        ),
        heldout=(
            "Please let {user} join {group} (gpasswd).",
            "{user} should be in {group}; gpasswd can see to it.",
        ),
        init=_BOTH,
        before=_THE_BOTH,
        gold="gpasswd -a {user} {group}",
        check="member {user} {group}",
        kept="! member {user} {group}",
    ),
    Kind(
        ("gpasswd",),
        train=(
            "Remove the user {user} from the group {group}.",
            "Use gpasswd to remove {user} from the group {group}.",
            "Take the user {user} out of the group {group}.",
        ),
        heldout=(
            "Please let {user} leave {group}.",
            "{group} should no longer count {user} among its members.",
        ),
        init=f"{_BOTH} && usermod -aG {{group}} {{user}}",
        before=_THE_BOTH,
        gold="gpasswd -d {user} {group}",
        check="! member {user} {group}",
        kept="member {user} {group}",
    ),
    Kind(
        ("chage",),
        train=(
            "The password of {user} must be changed every {days} days. Set this maximum.",
            "Set the maximum password age of {user} to {days} days.",
            "Make the password of the user {user} expire after {days} days.",
            "Use chage to set {user}'s maximum password age to {days} days.",
        ),
        heldout=(
            "Please let {user}'s password last {days} days at most.",
            "No password of {user} should be older than {days} days.",
        ),
        init=A_USER,
        before=THE_USER,
        gold="chage -M {days} {user}",
        check="entry shadow:{user} 5 {days}",
        kept="entry shadow:{user} 5 99999",
    ),
    Kind(
        ("chage",),
        train=(
            "Set the minimum password age of {user} to {days} days.",
            "Make {user} wait at least {days} days between password changes.",
            "Use chage to set {user}'s minimum password age to {days} days.",
        ),
        heldout=(
            "Please let {user} keep each password for {days} days at least.",
            "{days} days must pass before {user} may choose another password.",
        ),
        init=A_USER,
        before=THE_USER,
        gold="chage -m {days} {user}",
        check="entry shadow:{user} 4 {days}",
        kept="entry shadow:{user} 4 0",
    ),
    Kind(
        ("chage",),
        train=(
            "Warn {user} {days} days before their password expires.",
            "Set the password warning period of {user} to {days} days.",
            "Use chage to give {user} a warning {days} days before the password expires.",
        ),
        heldout=(
            "Please let {user} hear of an expiring password {days} days ahead.",
            "{user} should have {days} days' notice before a password runs out.",
        ),
        init=f"{A_USER} && chage -W 1 {{user}}",
        before=THE_USER,
        gold="chage -W {days} {user}",
        check="entry shadow:{user} 6 {days}",
        kept="entry shadow:{user} 6 1",
    ),
    Kind(
        ("chage",),
        train=(
            "Let the account of {user} expire on {date}.",
            "Set the account expiry date of {user} to {date}.",
            "Use chage to make the account {user} expire on {date}.",
        ),
        heldout=(
            "Please close {user}'s account as of {date}.",
            "{date} should be the day on which {user}'s account runs out.",
        ),
        init=A_USER,
        before=THE_USER,
        gold="chage -E {date} {user}",
        check="entry shadow:{user} 8 {epoch_days}",
        kept="entry shadow:{user} 8 ''",
        draw=_a_date,
    ),
    Kind(
        ("chsh",),
        train=(
            "Change the login shell of {user} to {shell}.",
            "Set {shell} as the login shell of the user {user}.",
            "Use chsh to give {user} the shell {shell}.",
            "The user {user} should log in with {shell}. Change the shell.",
        ),
        heldout=(
            "Please let {user} have {shell} for a shell.",
            "{shell} should greet {user} at the next login.",
            "I want {user} to work in {shell} from now on.",
        ),
        init="useradd -u {user.number} -s {old_shell} {user}",
        before=THE_USER,
        gold="chsh -s {shell} {user}",
        check="entry user:{user} 7 {shell}",
        kept="entry user:{user} 7 {old_shell}",
        draw=_another_shell,
    ),
    Kind(
        ("chown",),
        train=(
            "Make {user} the owner of {file}.",
            "Change the owner of {file} to {user}.",
            "Give the file {file} to the user {user}.",
            "Set the owner of {file} to {user}.",
        ),
        heldout=(
            "Please let {file} belong to {user}.",
            "{user} should own {file}.",
            "I want {file} to be {user}'s.",
        ),
        init=f"{A_USER} && {_A_FILE}",
        before=f"{{file}} {THE_USER}",
        gold="chown {user} {file}",
        check="has %u {user.number} {file} && lines {file} {file.name}",
        kept="has %u 0 {file}",
    ),
    Kind(
        ("chown",),
        train=(
            "Set the owner of {file} to {user} and its group to {group}.",
            "Change the ownership of {file} to {user}:{group}.",
            "Give {file} the owner {user} and the group {group}.",
        ),
        heldout=(
            "Please let {file} belong to {user} and to the group {group}.",
            "{user} of {group} should own {file}, both as user and as group.",
        ),
        init=f"{_BOTH} && {_A_FILE}",
        before=f"{{file}} {_THE_BOTH}",
        gold="chown {user}:{group} {file}",
        check="has %u:%g {user.number}:{group.number} {file} && lines {file} {file.name}",
        kept="has %u:%g 0:0 {file}",
    ),
    Kind(
        ("chown",),
        train=(
            "Make {user} the owner of {dir} and everything in it.",
            "Recursively change the owner of {dir} to {user}.",
            "Give the directory {dir}, with all its files, to the user {user}.",
        ),
        heldout=(
            "Please let {dir} and all it holds belong to {user}.",
            "{user} should own {dir}, contents included.",
        ),
        init=f"{A_USER} && {_A_FOLDER}",
        before=f"{_ITS_FILES} {THE_USER}",
        gold="chown -R {user} {dir}",
        check=f"has %u {{user.number}} {{dir}} {{dir}}/inner {_ITS_FILES}",
        kept=f"has %u 0 {{dir}} {{dir}}/inner {_ITS_FILES}",
    ),
    Kind(
        ("chgrp",),
        train=(
            "Change the group of {file} to {group}.",
            "Set the group of {file} to {group}.",
            "Make {group} the group of the file {file}.",
            "Give {file} to the group {group}.",
        ),
        heldout=(
            "Please let {file} be owned by the group {group}.",
            "{group} should be the group that owns {file}.",
        ),
        init=f"{A_GROUP} && {_A_FILE}",
        before=f"{{file}} {THE_GROUP}",
        gold="chgrp {group} {file}",
        check="has %u:%g 0:{group.number} {file} && lines {file} {file.name}",
        kept="has %g 0 {file}",
    ),
    Kind(
        ("chgrp",),
        train=(
            "Change the group of {dir} and everything in it to {group}.",
            "Recursively set the group of {dir} to {group}.",
            "Give the directory {dir}, with all its files, to the group {group}.",
        ),
        heldout=(
            "Please let {dir} and all it holds be owned by the group {group}.",
            "{group} should be the group of {dir}, contents included.",
        ),
        init=f"{A_GROUP} && {_A_FOLDER}",
        before=f"{_ITS_FILES} {THE_GROUP}",
        gold="chgrp -R {group} {dir}",
        check=f"has %u:%g 0:{{group.number}} {{dir}} {{dir}}/inner {_ITS_FILES}",
        kept=f"has %g 0 {{dir}} {{dir}}/inner {_ITS_FILES}",
    ),
)
