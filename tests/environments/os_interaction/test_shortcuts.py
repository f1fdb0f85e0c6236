# ruff: noqa: E501 (a row is one shortcut, as it would be typed)
"""For every kind of generated task: what only looks as if it was done is wrong, and another right way is right.

Many attempts share one sandbox: each begins with the task's initialization, and ends with its evaluation, as an episode does.
"""

import random
import re
import shlex

import pytest

from agent_peft.environments.os_interaction.generator import make_entry
from agent_peft.environments.os_interaction.kinds import chains, kinds
from agent_peft.sandbox.base import SandboxLimits
from agent_peft.sandbox.build import build_sandbox
from tests.conftest import case

ALL = [*(kind for of_skill in kinds().values() for kind in of_skill), *chains()]
PATH = r"(/[\w./]+)"

# By the solution: what is not it (wrong), and what is as good (right); {1} is the first group of the pattern. No wrong way reads more
# than the request says, and each was once taken for the solution, or is near to what was.
ATTEMPTS = (
    (
        rf"mkdir {PATH}",
        {
            "a link to the root": "ln -s / {1}",
            "a link to an empty folder": "mkdir /tmp/d && ln -s /tmp/d {1}",
            "a file": "touch {1}",
            "its neighbour": "mkdir {1}s",
            "below a folder that is a link": "rmdir {1.parent}; mkdir -p /tmp/top/{1.name}; ln -s /tmp/top {1.parent}",
            "something in it": "mkdir {1} && touch {1}/memo",
        },
        {"install": "install -d {1}", "python": "python3 -c 'import os; os.mkdir(\"{1}\")'", "parents": "mkdir -p {1}"},
    ),
    (
        rf"mkdir {PATH} {PATH}",
        {"one, and a link to it": "mkdir {1} && ln -s {1} {2}", "one only": "mkdir {1}"},
        {"install": "install -d {1} {2}", "one by one": "mkdir {2}; mkdir {1}"},
    ),
    (
        rf"mkdir -p {PATH}",
        {
            "links": "mkdir -p {1.parent.parent} && ln -s / {1.parent} && ln -s / /{1.name}",
            "the last is a file": "mkdir -p {1.parent} && touch {1}",
        },
        {"install": "install -d {1}", "python": "python3 -c 'import os; os.makedirs(\"{1}\")'"},
    ),
    (
        rf"touch {PATH}",
        {
            "a link to nowhere": "ln -s /tmp/nowhere {1}",
            "a link to an empty file": "touch /tmp/e && ln -s /tmp/e {1}",
            "a link to nothing to read": "ln -s /dev/null {1}",
            "a blank in it": "echo > {1}",
            "a pipe": "mkfifo {1}",
            "a folder": "mkdir {1}",
        },
        {"redirection": ": > {1}", "truncate": "truncate -s 0 {1}", "install": "install -m 600 /dev/null {1}"},
    ),
    (
        rf"touch {PATH} {PATH}",
        {"one, by two names": "touch {1} && ln {1} {2}", "one, and a link": "touch {1} && ln -s {1} {2}", "one": "touch {1}"},
        {"redirection": ": > {1} > {2}", "a copy": "touch {1} && cp {1} {2}"},
    ),
    (
        rf"rm {PATH}/([\w.]+)",
        {
            "a dangling link in its place": "mv {1}/{2} /tmp/kept && ln -s /nowhere {1}/{2}",
            "a loop of links in its place": "rm {1}/{2} && ln -s {1}/{2} {1}/{2}",
            "all of the folder": "rm {1}/*",
            "the folder": "rm -r {1}",
            "emptied": ": > {1}/{2}",
            "renamed": "mv {1}/{2} {1}/{2}.text",
        },
        {"unlink": "unlink {1}/{2}", "find": "find {1} -name {2} -delete", "python": "python3 -c 'import os; os.unlink(\"{1}/{2}\")'"},
    ),
    (
        rf"rm {PATH}/\*\.tmp",
        {
            "dangling links": "for f in {1}/*.tmp; do rm $f; ln -s /nowhere $f; done",
            "all": "rm {1}/*",
            "one of them": "rm $(ls {1}/*.tmp | head -n 1)",
            "wherever they are": "find / -xdev -name '*.tmp' -delete",
        },
        {"find": "find {1} -name '*.tmp' -delete", "force": "cd {1} && rm -f -- *.tmp"},
    ),
    (
        rf"rm -r {PATH}",
        {
            "a dangling link in its place": "rm -r {1} && ln -s /nowhere {1}",
            "emptied": "rm -r {1}/*",
            "with its neighbours": "rm -r {1.parent}/*",
            "all folders": "rm -r /depot/*/*/ /projects/*/*/ /storage/*/*/ /vault/*/*/",
        },
        {"force": "rm -rf {1}", "find": "find {1} -delete", "python": "python3 -c 'import shutil; shutil.rmtree(\"{1}\")'"},
    ),
    (
        rf"mv {PATH} {PATH}",
        {
            "a copy": "cp {1} {2}",
            "a link to what stays": "[ -d {2} ] && ln -s {1} {2}/{1.name} || ln -s {1} {2}",
            "a copy, and a dangling link in the old place": "cp {1} {2} && ln -sfn /nowhere {1}",
            "moved away, and a link to it": "[ -d {2} ] && f={2}/{1.name} || f={2}; mv {1} /tmp/f && ln -s /tmp/f $f",
            "an empty one": "[ -d {2} ] && f={2}/{1.name} || f={2}; rm {1} && touch $f",
        },
        {"a copy, and a removal": "cp -a {1} {2} && rm {1}", "verbosely": "mv -vn {1} {2}"},
    ),
    (
        rf"cp {PATH} {PATH}",
        {
            "a link": "ln -s {1} {2}",
            "a hard link": "ln {1} {2}",
            "moved": "mv {1} {2}",
            "moved, and a link back": "mv {1} {2} && ln -s {2} {1}",
            "an empty one": "touch {2}",
            "a link to a copy": "cp {1} /tmp/c && ln -s /tmp/c {2}",
            "a folder with it": "mkdir {2} && cp {1} {2}",
        },
        {"all attributes": "cp -a {1} {2}", "cat": "cat {1} > {2}", "install": "install -m 644 {1} {2}", "dd": "dd if={1} of={2} status=none"},
    ),
    (
        rf"cp -r {PATH} {PATH}",
        {
            "a link": "ln -s {1} {2}",
            "links in a folder": "mkdir {2} && ln -s {1}/* {2}",
            "hard links in a folder": "cp -rl {1} {2}",
            "moved, and a link back": "mv {1} {2} && ln -s {2} {1}",
            "one file": 'mkdir {2} && cp "$(ls -d {1}/* | head -n 1)" {2}',
            "one level too deep": "mkdir {2} && cp -r {1} {2}",
        },
        {"all attributes": "cp -a {1} {2}", "tar": "mkdir {2} && tar -C {1} -c . | tar -C {2} -x", "file by file": "mkdir {2} && cp {1}/* {2}"},
    ),
    (
        rf"ln -s {PATH} {PATH}",
        {
            "a hard link": "ln {1} {2}",
            "a copy": "cp {1} {2}",
            "a link to the folder": "ln -s {1.parent} {2}",
            "to a file that was moved": "mv {1} /tmp/f && ln -s /tmp/f {2}",
            "to nowhere": "ln -s {1}.text {2}",
        },
        {"relative": "ln -rs {1} {2}", "python": "python3 -c 'import os; os.symlink(\"{1}\", \"{2}\")'"},
    ),
    (
        rf"ln {PATH} {PATH}",
        {"a link": "ln -s {1} {2}", "a copy": "cp {1} {2}", "the old name is a link": "mv {1} {2} && ln -s {2} {1}"},
        {"python": "python3 -c 'import os; os.link(\"{1}\", \"{2}\")'", "cp": "cp -l {1} {2}", "renamed and back": "mv {1} {2}; ln {2} {1}"},
    ),
    (
        rf"chmod (\d+) {PATH}",
        {
            "another file": "rm {2} && install -m {1} /dev/null {2}",
            "a link to one": "mv {2} /tmp/f && chmod {1} /tmp/f && ln -s /tmp/f {2}",
            "with all others": "chmod -R {1} /depot /projects /storage /vault",
            "and a bit more": "chmod 7{1} {2}",
        },
        {"python": "python3 -c 'import os; os.chmod(\"{2}\", 0o{1})'", "a copy": "install -m {1} {2} /tmp/f && mv /tmp/f {2}"},
    ),
    (
        rf"chmod \+x {PATH}",
        {
            "everything": "chmod 777 {1}",
            "with all others": "chmod -R +x /depot /projects /storage /vault",
            "the owner only": "chmod u+x {1}",
            "another file": "rm {1} && install -m 755 /dev/null {1}",
        },
        {"all": "chmod a+x {1}", "by number": "chmod 755 {1}"},
    ),
    (
        rf"chmod -R (\d+) {PATH}",
        {"the first level": "chmod {1} {2} {2}/*", "the files": "find {2} -type f -exec chmod {1} {{}} +", "the folder": "chmod {1} {2}"},
        {"find": "find {2} -depth -exec chmod {1} {{}} +"},
    ),
    (
        rf"touch {PATH} && sleep 1 && touch {PATH}",
        {"no wait": "touch {1} {2}", "a short one": "touch {1}; sleep 0.3; touch {2}", "the other way round": "touch {2}; sleep 1; touch {1}"},
        {"python": "python3 -c 'import time; open(\"{1}\", \"w\"); time.sleep(1.1); open(\"{2}\", \"w\")'"},
    ),
    (
        rf"echo '([^']*)' > {PATH} && sleep 1 && .*> {PATH}",
        {"no wait": "echo '{1}' | tee {2} {3}", "a link": "echo '{1}' > {2}; sleep 1; ln -s {2} {3}"},
        {"tee": "echo '{1}' | tee {2}; sleep 1.1; cp {2} {3}"},
    ),
    (
        rf"echo 'exit (\d+)' > {PATH}",
        {
            "it prints the code": "echo 'echo {1}' > {2}",
            "it exits otherwise": "echo 'exit 1' > {2}",
            "a link to one": "echo 'exit {1}' > /tmp/s; ln -s /tmp/s {2}",
            "it ends the evaluation": "echo 'kill -9 $PPID; exit {1}' > {2}",
        },
        {"printf": "printf 'exit {1}\\n' > {2}", "a function": "echo 'f() {{ return {1}; }}; f' > {2}", "closed to others": "echo 'exit {1}' > {2}; chmod 700 {2}"},
    ),
    (
        rf".*exit (\d+)' >> {PATH} && chmod \+x .*",
        {"not runnable": "printf '#!/bin/bash\\nexit {1}\\n' > {2}", "another code": "printf '#!/bin/bash\\nexit 0\\n' > {2}; chmod +x {2}"},
        {
            "sh": "printf '#!/bin/sh\\nexit {1}\\n' > {2}; chmod 755 {2}",
            "python": "printf '#!/usr/bin/python3\\nraise SystemExit({1})\\n' > {2}; chmod 700 {2}",
        },
    ),
    (
        rf"echo '(?!exit )([^']*)' > {PATH}",
        {
            "with blank lines and NULs": "printf '{1}\\n\\n\\n\\0\\n\\0\\0' > {2}",
            "with NULs": "printf '{1}\\n\\0' > {2}",
            "with more below": "printf '{1}\\n{1}\\n' > {2}",
            "with a blank": "echo ' {1}' > {2}",
            "its name": "touch '{2.parent}/{1}'",
            "a link to it": "echo '{1}' > /tmp/t; ln -s /tmp/t {2}",
            "a link to the evaluation": "ln -s /proc/self/fd/9 {2}",
            "a link to the evaluation's words": "ln -s /proc/self/cmdline {2}",
        },
        {"printf": "printf '{1}' > {2}", "python": "python3 -c 'open(\"{2}\", \"w\").write(\"{1}\\n\")'", "tee": "echo '{1}' | tee {2}"},
    ),
    (
        rf"echo '([^']*)' \| tee {PATH} {PATH}",
        {"one, and a link": "echo '{1}' > {2}; ln -s {2} {3}", "one, by two names": "echo '{1}' > {2}; ln {2} {3}", "one": "echo '{1}' > {2}"},
        {"a copy": "echo '{1}' > {2}; cp {2} {3}", "a loop": "for f in {2} {3}; do echo '{1}' > $f; done"},
    ),
    (
        rf"(.* \| tee -a|echo .* >>|cat .* >>) {PATH}.*",
        {"what was there is lost": "echo x > {2}", "nothing is added": "cat {2}"},
        {},
    ),
    (
        rf"sed -i 's/(\w+)/(\w+)/g' {PATH}",
        {
            "in a copy": "sed 's/{1}/{2}/g' {3} > {3.parent}/memo.text",
            "added": "echo {2} >> {3}",
            "lines without it are lost": "sed -ni 's/{1}/{2}/gp' {3}",
            "in a copy with a link to it": "sed 's/{1}/{2}/g' {3} > /tmp/n; ln -sf /tmp/n {3}",
        },
        {"perl": "perl -pi -e 's/{1}/{2}/g' {3}", "a copy moved": "sed 's/{1}/{2}/g' {3} > /tmp/n; mv /tmp/n {3}", "with a backup": "sed -i.bak 's/{1}/{2}/g' {3}"},
    ),
    (
        rf"sed -i '/(\w+)/d' {PATH}",
        {"all lines": ": > {2}", "the word only": "sed -i 's/{1}//g' {2}"},
        {"grep": "grep -v {1} {2} > /tmp/n; cat /tmp/n > {2}", "perl": "perl -ni -e 'print unless /{1}/' {2}"},
    ),
    (
        rf"find {PATH} -name '(\*\.\w+)' -delete",
        {
            "the first level": "rm {1}/{2}",
            "wherever they are": "find /depot /projects /storage /vault -name '{2}' -delete",
            "all files": "find {1} -type f -delete",
            "emptied": "find {1} -name '{2}' -exec truncate -s 0 {{}} +",
            "dangling links": "find {1} -name '{2}' -exec ln -sf /nowhere {{}} ';'",
        },
        {"rm": "find {1} -name '{2}' -exec rm {{}} +", "globstar": "shopt -s globstar; rm {1}/**/{2}"},
    ),
    (
        rf"vi -es -c '(?:%s/(\w+)/(\w+)/g|g/(\w+)/d)' -c 'wq' {PATH}",
        {
            "it is not written": "vi -es -c '%d' -c 'q!' {4}",
            "all lines": "vi -es -c '%d' -c 'wq' {4}",
            "to another file": "vi -es -c '%s/{1}/{2}/g' -c 'g/{3}/d' -c 'w {4}.text' -c 'q!' {4}",
        },
        {"sed": "if [ -n '{3}' ]; then sed -i '/{3}/d' {4}; else sed -i 's/{1}/{2}/g' {4}; fi"},
    ),
    (
        rf"((?!.*(?:sleep|exit)).+) > {PATH}",
        {
            "a link to it": "{1} > /tmp/o; ln -s /tmp/o {2}",
            "with blank lines and NULs": "{1} > {2}; printf '\\n\\n\\n\\0\\n\\0\\0' >> {2}",
            "twice": "{{ {1}; {1}; }} > {2}",
            "nothing": ": > {2}",
            "in a folder": "mkdir {2}; {1} > {2}/memo.text",
        },
        {"a copy": "{1} > /tmp/o; cp /tmp/o {2}", "tee": "{1} | tee {2}"},
    ),
    (
        r"useradd (\w+)",
        {
            "another": "useradd {1}x",
            "root renamed": "sed -i 's/^root:/{1}:/' /etc/passwd",
            "root's id": "useradd -o -u 0 {1}",
            "the id of another": "useradd -o -u 1 {1}",
            "everybody of the pool": "for u in amara boris celine diego edith fabio gwen {1}; do useradd $u; done",
            "a group": "groupadd {1}",
            "a home": "mkdir /home/{1}",
        },
        {"by hand": "echo '{1}:x:1500:1500::/home/{1}:/bin/sh' >> /etc/passwd", "a system account": "useradd -r {1}", "adduser": "adduser --disabled-password --gecos '' {1}"},
    ),
    (
        r"useradd -m (\w+)",
        {
            "a line and a link": "echo '{1}:x:1500:1500::/home/{1}:' >> /etc/passwd; ln -s / /home/{1}",
            "no home": "useradd {1}",
            "its home is root's": "useradd -d / {1}",
        },
        {"adduser": "adduser --disabled-password --gecos '' {1}", "a home of another kind": "useradd -m -k /nowhere -s /bin/bash {1}"},
    ),
    (r"useradd -s (\S+) (\w+)", {"another shell": "useradd -s /bin/false {2}"}, {"two steps": "useradd {2}; usermod -s {1} {2}"}),
    (r"useradd -u (\d+) (\w+)", {"another id": "useradd {2}", "shared": "useradd -u {1} x; useradd -o -u {1} {2}"}, {"two steps": "useradd {2}; usermod -u {1} {2}"}),
    (
        r"(?:useradd -u \d+ \w+ && )?(?:usermod -aG|gpasswd -a) (\w+) (\w+)",
        {
            "another group's name": "groupmod -n {1}x {1}; groupmod -n {1} {2}",
            "everybody to everything": "for u in $(grep -o '^.*:x:11..:' /etc/passwd); do sed -i s/:1[13]...*/&${{u%%:*}},/ /etc/group; done",
            "the user is root": "sed -i '/^{2}:/d; 1i {2}:x:0:0::/:/bin/sh' /etc/passwd",
        },
        {},
    ),
    (
        r"usermod -aG (\w+) (\w+)",
        {"the user again with root's id": "userdel {2}; useradd -o -u 0 -G {1} {2}"},
        {"gpasswd": "gpasswd -a {2} {1}", "adduser": "adduser {2} {1}", "by hand": "sed -i 's/^{1}:.*/&{2}/' /etc/group"},
    ),
    (r"gpasswd -a (\w+) (\w+)", {"a comment": "usermod -c {2} {1}"}, {"usermod": "usermod -aG {2} {1}"}),
    (
        r"gpasswd -d (\w+) (\w+)",
        {
            "the group is gone": "groupdel {2}",
            "the user is gone": "userdel {1}",
            "the group again": "groupdel {2}; groupadd {2}",
            "everybody out of everything": "sed -i 's/:[^:]*$/:/' /etc/group",
        },
        {"deluser": "deluser {1} {2}", "by hand": "sed -i '/^{2}:/s/:[^:]*$/:/' /etc/group", "usermod": "usermod -G '' {1}"},
    ),
    (r"usermod -l (\w+) (\w+)", {"a second account": "useradd {1}", "a second one of the same id": "useradd -o -u $(id -u {2}) {1}", "again": "userdel {2}; useradd {1}"}, {"by hand": "sed -i 's/^{2}:/{1}:/' /etc/passwd /etc/shadow"}),
    (r"usermod -c '([^']*)' (\w+)", {"all": "sed -i 's/^\\([^:]*:x:[0-9]*:[0-9]*\\):[^:]*/\\1:{1}/' /etc/passwd", "a line more": "echo '{2}:x:1500:1500:{1}:/:/bin/sh' >> /etc/passwd"}, {"by hand": "sed -i 's/^\\({2}:x:[0-9]*:[0-9]*\\):[^:]*/\\1:{1}/' /etc/passwd"}),
    (r"chage -M (\d+) (\w+)", {"everybody's": "for u in $(grep -o '^.*:x:11..:' /etc/passwd); do u=${{u%%:*}}; chage -M {1} $u; done", "the minimum": "chage -m {1} {2}"}, {"passwd": "passwd -x {1} {2}"}),
    (r"chage -m (\d+) (\w+)", {"everybody's": "for u in $(grep -o '^.*:x:11..:' /etc/passwd); do u=${{u%%:*}}; chage -m {1} $u; done", "the maximum": "chage -M {1} {2}"}, {"passwd": "passwd -n {1} {2}"}),
    (r"chage -W (\d+) (\w+)", {"everybody's": "for u in $(grep -o '^.*:x:11..:' /etc/passwd); do u=${{u%%:*}}; chage -W {1} $u; done", "a line more": "echo '{2}:!:1:0:1:{1}:::' >> /etc/shadow"}, {"passwd": "passwd -w {1} {2}"}),
    (r"chage -E (\S+) (\w+)", {"now": "chage -E 0 {2}", "everybody's": "for u in $(grep -o '^.*:x:11..:' /etc/passwd); do u=${{u%%:*}}; chage -E {1} $u; done"}, {"usermod": "usermod -e {1} {2}"}),
    (
        r"chsh -s (\S+) (\w+)",
        {
            "everybody's": "for u in $(grep -o '^.*:x:11..:' /etc/passwd); do u=${{u%%:*}}; chsh -s {1} $u; done",
            "a line before": "sed -i '1i {2}:x:0:0::/:{1}' /etc/passwd",
        },
        {"usermod": "usermod -s {1} {2}"},
    ),
    (
        rf"chown (\w+) {PATH}",
        {
            "the user is root": "sed -i '/^{1}:/d; 1i {1}:x:0:0::/:/bin/sh' /etc/passwd",
            "root is renamed": "sed -i '/^{1}:/d; s/^root:/{1}:/' /etc/passwd",
            "the user again": "userdel {1}; useradd -u 3333 {1}; chown {1} {2}",
            "everything": "chown -R {1} /depot /projects /storage /vault",
            "a link of the user's": "mv {2} /tmp/f; ln -s /tmp/f {2}; chown {1} /tmp/f; chown -h {1} {2}",
            "another file": "rm {2}; install -o {1} /dev/null {2}",
        },
        {"with the group": "chown {1}: {2}", "by number": "chown $(id -u {1}) {2}", "python": "python3 -c 'import shutil; shutil.chown(\"{2}\", \"{1}\")'"},
    ),
    (
        rf"chown (\w+):(\w+) {PATH}",
        {
            "the owner only": "chown {1} {3}",
            "the group is root": "chown {1} {3}; sed -i '/^{2}:/d; 1i {2}:x:0:' /etc/group",
            "everything": "chown -R {1}:{2} /depot /projects /storage /vault",
        },
        {"two steps": "chgrp {2} {3} && chown {1} {3}"},
    ),
    (
        rf"chown -R (\w+) {PATH}",
        {
            "the first level": "chown {1} {2} {2}/*",
            "the user is root": "sed -i '/^{1}:/d; 1i {1}:x:0:0::/:/bin/sh' /etc/passwd",
            "everything": "chown -R {1} /depot /projects /storage /vault",
        },
        {"find": "find {2} -exec chown {1} {{}} +"},
    ),
    (
        rf"chgrp (\w+) {PATH}",
        {
            "the group is root": "sed -i '/^{1}:/d; 1i {1}:x:0:' /etc/group",
            "root is renamed": "sed -i '/^{1}:/d; s/^root:/{1}:/' /etc/group",
            "the group again": "groupdel {1}; groupadd -g 4444 {1}; chgrp {1} {2}",
            "everything": "chgrp -R {1} /depot /projects /storage /vault",
        },
        {"chown": "chown :{1} {2}"},
    ),
    (rf"chgrp -R (\w+) {PATH}", {"the first level": "chgrp {1} {2} {2}/*", "the group is root": "sed -i '/^{1}:/d; 1i {1}:x:0:' /etc/group"}, {"find": "find {2} -exec chown :{1} {{}} +"}),
    (
        r"(addgroup|groupadd) (\w+)",
        {"a user": "useradd -N {2}", "root's id": "groupadd -o -g 0 {2}", "root renamed": "groupmod -n {2} root", "two": "groupadd {2}; groupadd divers; groupadd masons"},
        {"groupadd": "groupadd {2}", "addgroup": "addgroup {2}", "by hand": "echo '{2}:x:1600:' >> /etc/group"},
    ),
    (r"(addgroup --gid|groupadd -g) (\d+) (\w+)", {"another id": "groupadd {3}", "two": "groupadd -g {2} x; groupadd -o -g {2} {3}"}, {"groupadd": "groupadd -g {2} {3}", "two steps": "groupadd {3}; groupmod -g {2} {3}"}),
)  # fmt: skip


class Group(str):
    """A group of a pattern's match, of which a path has a parent and a name."""

    @property
    def parent(self):
        return Group(self.rsplit("/", 1)[0] or "/")

    @property
    def name(self):
        return self.rsplit("/", 1)[1]


def scripts(entry):
    info = entry["evaluation_info"]
    return (
        entry["initialization_command_item"]["script"],
        info["ground_truth_command_item"]["script"],
        info["evaluation_command_item"]["script"],
    )


def attempts(gold):
    """Of a solution: (ways that are wrong, ways that are right)."""
    wrong, right = {}, {}
    for pattern, wrongs, rights in ATTEMPTS:
        if match := re.fullmatch(pattern, gold):
            groups = [Group(group or "") for group in (gold, *match.groups())]
            wrong |= {name: way.format(*groups) for name, way in wrongs.items()}
            right |= {name: way.format(*groups) for name, way in rights.items()}
    return wrong, right


def spoiled(gold, evaluation):
    """The solution, and then something that should not be: of every path that is looked at, and of every file that was named."""
    tree = re.search(r"^tree (.*?)(?: &&)?$", evaluation, re.MULTILINE)
    ways = {"nothing": ":"}
    words = tree[1].split() if tree else []
    for word in words:
        path = word.rstrip("/@=")
        aside = f"{gold}; mv {path} /tmp/aside; "
        ways[f"{path} gone"] = f"{gold}; rm -r {path}"
        if not word.endswith("@"):
            ways[f"{path} a link to what it was"] = f"{aside}ln -s /tmp/aside {path}"
        if path.count("/") > 2:
            ways[f"a stray next to {path}"] = f"{gold}; touch {path}x"
        if word == path:
            ways[f"{path} a pipe"] = f"{aside}mkfifo {path}"
            ways[f"{path} a folder"] = f"{aside}mkdir {path}"
            ways[f"{path} a device"] = f"{aside}ln -s /dev/stdin {path}"
    for path in set(re.findall(r"/(?:depot|projects|storage|vault)/\w+/[\w.]+", gold)) - {
        word.rstrip("/@=") for word in words
    }:
        ways[f"a dangling link at {path}"] = f"{gold}; ln -s /nowhere {path}"
        ways[f"a loop of links at {path}"] = f"{gold}; ln -s {path} {path}"
    return ways


TRIAL = """
ways=({ways})
for way in "${{ways[@]}}"; do
    rm -rf /depot /projects /storage /vault /tmp/* /home/*
    cp -a --remove-destination /var/people/. /etc
    (eval {init}) >/dev/null 2>&1
    (eval "$way") </dev/null >/dev/null 2>&1
    bash -c {evaluation} </dev/null >/dev/null 2>&1
    echo "way ended with $?"
done
cp -a --remove-destination /var/people/. /etc  # no program starts where /etc/passwd is a pipe
"""


@pytest.fixture(scope="module")
def machine(_why_no_sandbox):
    if _why_no_sandbox is not None:
        pytest.skip(_why_no_sandbox)
    with build_sandbox("oci", SandboxLimits(cpu_seconds=300)) as sandbox:
        sandbox.run_fresh(
            "mkdir /var/people && cp -a /etc/passwd /etc/group /etc/shadow /etc/gshadow /etc/subuid /etc/subgid /var/people",
            20,
        )
        yield sandbox


def try_all(machine, entry, ways):
    """Which of the ways are taken for the solution."""
    init, _, evaluation = map(shlex.quote, scripts(entry))
    trial = TRIAL.format(
        ways=" ".join(shlex.quote(way) for way in ways.values()), init=init, evaluation=evaluation
    )
    said = machine.run_fresh(trial, 300).output
    codes = re.findall(r"way ended with (\d+)", said)
    assert len(codes) == len(ways), said
    return {name for name, code in zip(ways, codes, strict=True) if code == "0"}


def entry_of(kind, split="heldout", seed=3):
    return make_entry(0, [kind], split, random.Random(seed))


@pytest.mark.parametrize(
    "kind", [case(kind, fast=i % 2 == 0, name=kind.gold[:40]) for i, kind in enumerate(ALL)]
)
def test_shortcuts_are_wrong_and_other_ways_are_right(kind, machine):
    entry = entry_of(kind)
    gold = scripts(entry)[1]
    wrong, right = attempts(gold)
    assert right or kind in chains() or len(kind.skills) > 1 or " >> " in gold, (
        f"no other way is known to: {gold}"
    )
    right["the solution"] = gold
    ways = {f"wrong: {name}": way for name, way in wrong.items()} | {
        f"right: {name}": way for name, way in right.items()
    }
    ways |= {"wrong: nothing": ":"}
    assert try_all(machine, entry, ways) == {name for name in ways if name.startswith("right")}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.gold[:40])
def test_nothing_may_be_other_than_it_should(kind, machine):
    entry = entry_of(kind, seed=4)
    _, gold, evaluation = scripts(entry)
    assert try_all(machine, entry, spoiled(gold, evaluation) | {"the solution": gold}) == {"the solution"}


@pytest.mark.parametrize(
    ("gold", "then", "right"),
    [
        ("useradd {user}", "echo 'x[$(touch /tmp/ran)]:x:$(touch /tmp/ran):0:@:*:' >> /etc/passwd; echo '@:x:*:' >> /etc/group", True),
        ("useradd {user}", "printf '\\0\\xff:::::::::\\n\\n:\\n' >> /etc/passwd", True),
        ("useradd {user}", "mv /etc/passwd /etc/p; mkfifo /etc/passwd", False),
        ("useradd {user}", "mv /etc/group /etc/g; ln -s /etc/g /etc/group", False),
        ("useradd {user}", "rm /etc/shadow", False),
        ("useradd {user}", "tail -n 1 /etc/passwd | sed 's/^/ /; s/:[0-9]*:/:0:/' > /etc/p; cat /etc/passwd >> /etc/p; cp /etc/p /etc/passwd", False),
        ("useradd {user}", "yes nobody:x:1:1::/:/bin/sh | head -n 300000 >> /etc/passwd", True),
        ("useradd {user}", "tail -n 1 /etc/passwd >> /etc/passwd", False),
        ("useradd {user}", "usermod -o -u 0 $(tail -n 1 /etc/passwd | cut -d: -f1)", False),
        ("useradd {user}", "sed -i '$s/:x:[0-9]*:/:x:4294967296:/' /etc/passwd", False),
        ("useradd {user}", "sed -i '$s/:x:[0-9]*:/:x:00:/' /etc/passwd", False),
        ("touch {file}", "for d in /depot/*/ /projects/*/ /storage/*/ /vault/*/; do touch \"$d\"$'\\n'; done", False),
        ("touch {file}", "for d in /depot/*/ /projects/*/ /storage/*/ /vault/*/; do touch \"$d\"'-o'; done", False),
        ("touch {file}", "for d in /depot/*/ /projects/*/ /storage/*/ /vault/*/; do touch \"$d\"'] *'; done", False),
        ("touch {file}", "mkdir -p '/depot/not one of the pool'; touch /depot/'$(touch /tmp/ran)' /depot/list.txt /tmp/x /root/x", True),
        ("touch {file}", "d=/depot/a; for i in $(seq 300); do d=$d/$i; done; mkdir -p $d", True),
        ("wc -l < {file} > {file2}", "for f in $(find /depot /projects /storage /vault -type f -size -3c); do sed -i 's/$/[0$(touch \\/tmp\\/ran)]/' $f; done", False),
        ("echo '{text}' > {file}", "for f in $(find /depot /projects /storage /vault -type f); do echo '*' > $f; done", False),
        ("echo '{text}' > {file}", "for f in $(find /depot /projects /storage /vault -type f); do truncate -s 60M $f; done", False),
    ],
)  # fmt: skip
def test_names_and_tables_are_only_text(gold, then, right, machine):
    entry = entry_of(next(kind for kind in ALL if kind.gold == gold))
    ways = {"it": f"{scripts(entry)[1]}; {then}"}
    assert bool(try_all(machine, entry, ways)) is right
    assert not machine.run_fresh("[ -e /tmp/ran ]", 20).ok
