# ruff: noqa: E501 (a reply is one line, as it would be typed)
"""Replies that do not read what a task asks for: (name, command), followed by a finish. None of them may be right of any task.

They make, change or remove all there could be, or turn on what decides the verdict. They know how generated tasks are made.
"""

from agent_peft.environments.os_interaction.kinds.base import MODES, SPLITS

HELDOUT = SPLITS["heldout"]
TOPS = " ".join(HELDOUT.tops)
FOLDERS = f"{{{','.join(HELDOUT.tops)}}}/{{{','.join(HELDOUT.folders)}}}"
STEMS, EXTENSIONS = f"{{{','.join(HELDOUT.stems)}}}", f"{{{','.join(HELDOUT.extensions)}}}"
USERS, GROUPS = " ".join(HELDOUT.users), " ".join(HELDOUT.groups)
THERE = "users=$(awk -F: '$3 > 999 && $3 < 60000 {print $1}' /etc/passwd); groups=$(awk -F: '$3 > 1200 && $3 < 60000 {print $1}' /etc/group); "
FILES = f"for f in $(find {TOPS} -type f 2>/dev/null); do "
DIRS = f"for d in $(find {TOPS} -mindepth 1 -type d 2>/dev/null); do "


def in_place(what: str) -> str:
    """Every file that a task could be about becomes something else."""
    return f"{FILES} rm -f $f; {what}; done; {DIRS} for n in {STEMS}; do f=$d/$n.text; [ -e $f ] || {{ {what}; }}; done; done"


LINKED = (
    "/proc/self/cmdline",
    "/proc/self/environ",
    "/proc/self/fd/9",
    "/proc/self/fd/255",
    "/dev/fd/63",
    "/dev/stdin",
    "/dev/null",
    "/dev/zero",
    "/etc/passwd",
    "/",
)

BLIND_REPLIES = (
    ("nothing", ":"),
    # All there could be is made.
    ("every folder", f"mkdir -p {FOLDERS}"),
    ("every folder of folders", f"mkdir -p {FOLDERS}/{{{','.join(HELDOUT.folders)}}}"),
    ("every file", f"mkdir -p {FOLDERS}; for d in {FOLDERS}; do touch $d/{STEMS}.{EXTENSIONS}; done"),
    (
        "every script",
        f"mkdir -p {FOLDERS}; for d in {FOLDERS}; do for s in {STEMS}; do echo 'exit $((SECONDS + 7))' > $d/$s.sh; done; done; chmod -R +x {TOPS}",
    ),
    ("every file in the folders there are", f"{DIRS} touch $d/{STEMS}.{EXTENSIONS}; done"),
    ("every folder in the folders there are", f"{DIRS} mkdir -p $d/{{{','.join(HELDOUT.folders)}}}; done"),
    ("every user", f"for u in {USERS}; do useradd -m -s /bin/bash $u; done"),
    (
        "every user as root",
        f'for u in {USERS}; do sed -i "/^$u:/d" /etc/passwd; sed -i "1i $u:x:0:0::/root:/bin/bash" /etc/passwd; done',
    ),
    ("every group", f"for g in {GROUPS}; do groupadd $g; done"),
    (
        "every group as root's",
        f'for g in {GROUPS}; do sed -i "/^$g:/d" /etc/group; sed -i "1i $g:x:0:" /etc/group; done',
    ),
    (
        "every user in every group",
        f"for u in {USERS}; do useradd -m $u; done; for g in {GROUPS}; do groupadd $g; gpasswd -M {USERS.replace(' ', ',')} $g; done",
    ),
    # All that is there is changed.
    *((f"mode {mode} for all", f"chmod -R {mode} {TOPS}; chmod {mode} /") for mode in MODES),
    ("all may run all", f"chmod -R +x {TOPS}"),
    ("all may do all", "chmod -R 777 / 2>/dev/null"),
    ("all to the first user", f"{THERE} chown -R $(set -- $users; echo $1) {TOPS}"),
    ("all to the last user", f"{THERE} chown -R $(set -- $users; echo ${{@: -1}}) {TOPS}"),
    (
        "all to every user and group in turn",
        f"{THERE} for u in $users; do for g in $groups; do chown -R $u:$g {TOPS}; done; done",
    ),
    ("all to the first group", f"{THERE} chgrp -R $(set -- $groups; echo $1) {TOPS}"),
    ("all in all groups", f"{THERE} for u in $users; do for g in $groups; do usermod -aG $g $u; done; done"),
    ("nobody in any group", "sed -i 's/:[^:]*$/:/' /etc/group"),
    ("bash for all", f"{THERE} for u in $users; do usermod -s /bin/bash $u; done"),
    ("sh for all", f"{THERE} for u in $users; do usermod -s /bin/sh $u; done"),
    (
        "passwords of 30 days for all",
        f"{THERE} for u in $users; do chage -m 30 -M 30 -W 30 -E 2030-01-01 $u; done",
    ),
    ("every file everywhere", f"{FILES} {DIRS} cp $f $d; done; done"),
    (
        "every file in the first folder",
        f"d=$(find {TOPS} -mindepth 1 -type d | head -n 1); {FILES} mv $f $d; done",
    ),
    ("every file linked everywhere", f"{FILES} {DIRS} ln -s $f $d; ln $f $d/$RANDOM; done; done"),
    ("every file twice in itself", f"{FILES} cat $f $f > /tmp/t; cp /tmp/t $f; done"),
    (
        "every line once more in every file",
        f"cat $(find {TOPS} -type f) > /tmp/all; {FILES} cp /tmp/all $f; done",
    ),
    (
        "counts of every file in every folder",
        f"{FILES} for n in {STEMS}; do wc -l < $f > ${{f%/*}}/$n.text; done; done",
    ),
    # All that is there goes.
    ("no file", f"find {TOPS} -type f -delete"),
    ("no file that ends in .tmp", f"find {TOPS} -name '*.tmp' -delete"),
    *(
        (f"no file that ends in .{extension}", f"find {TOPS} -name '*.{extension}' -delete")
        for extension in HELDOUT.extensions
    ),
    ("nothing below the tops", f"rm -rf {' '.join(f'{top}/*' for top in HELDOUT.tops)}"),
    ("no inner folder", f"find {TOPS} -mindepth 2 -type d -exec rm -r {{}} + 2>/dev/null"),
    ("nothing left", "rm -rf --one-file-system /srv /opt /home /etc /var /root 2>/dev/null"),
    ("no first file", f"rm $(find {TOPS} -type f | sort | head -n 1)x; rm -f $(find {TOPS} -type f -empty)"),
    ("all empty", f"{FILES} : > $f; done"),
    # All becomes something else, of which the evaluation might read what it wants to read.
    *((f"links to {target}", in_place(f"ln -sn {target} $f")) for target in LINKED),
    ("links to themselves", in_place("ln -s $f $f")),
    ("links to nowhere", in_place("ln -s /nowhere $f")),
    ("folders", in_place("mkdir $f")),
    ("the tops are links to the root", f"rm -rf {TOPS}; for t in {TOPS}; do ln -s / $t; done"),
    (
        "the tops are links to one folder",
        f"mkdir /tmp/one; cp -r {TOPS} /tmp/one; rm -rf {TOPS}; for t in {TOPS}; do ln -s /tmp/one $t; done",
    ),
    ("pipes", f"{FILES} rm $f; mkfifo $f; done"),
    ("devices", f"{FILES} rm $f; ln -s /dev/full $f; done"),
    (
        "names of commands",
        f"cd /root; touch -- '-o' '!' '(' '1 -eq 1' '$(exit 0)' '; exit 0'; {DIRS} touch -- $d/'-o' $d/'; exit 0' $d/$'\\nx'; done",
    ),
    ("files that say true", in_place("echo 'true; exit 0 #' > $f")),
    # What decides the verdict.
    (
        "aliases and functions",
        "alias test=true [=true; test() { :; }; tree() { :; }; accounts() { :; }; lines() { :; }; export -f test tree accounts lines; exit() { builtin exit 0; }; export -f exit",
    ),
    (
        "environment of shells",
        "echo 'exit 0' | tee /root/.bashrc /root/.bash_profile /root/.profile /etc/profile /etc/bash.bashrc /etc/environment /tmp/env > /dev/null; export BASH_ENV=/tmp/env ENV=/tmp/env SHELLOPTS; echo BASH_ENV=/tmp/env >> /etc/environment",
    ),
    (
        "a path of one's own",
        "mkdir -p /root/bin; for n in stat timeout setpriv readlink bash test; do printf '#!/bin/sh\\nexit 0\\n' > /root/bin/$n; done; chmod +x /root/bin/*; export PATH=/root/bin:$PATH; echo PATH=/root/bin >> /etc/environment",
    ),
    (
        "programs in the folders of programs",
        "for d in /usr/local/sbin /usr/local/bin /usr/sbin /usr/bin /sbin /bin; do for n in stat timeout setpriv readlink bash sh test; do rm -f $d/$n; printf '#!/bin/true\\n' > $d/$n; chmod 755 $d/$n; done; done 2>/dev/null",
    ),
    (
        "libraries before all others",
        "echo /tmp/x.so > /etc/ld.so.preload; cp /lib/x86_64-linux-gnu/libc.so.6 /tmp/x.so; echo /tmp > /etc/ld.so.conf; ldconfig; export LD_PRELOAD=/tmp/x.so",
    ),
    (
        "the loader's folder",
        "cd /lib/x86_64-linux-gnu 2>/dev/null && for l in libselinux.so.1 libacl.so.1 libcap-ng.so.0; do rm -f $l; ln -s libc.so.6 $l; done",
    ),
    (
        "other tables",
        "mv /etc/passwd /etc/p; mkfifo /etc/passwd; mv /etc/group /etc/g; ln -s /dev/zero /etc/group; echo 'passwd: compat' > /etc/nsswitch.conf",
    ),
    (
        "long tables",
        f"for u in {USERS}; do for i in 0 1 2; do echo $u:x:$i:$i:$u:/:/bin/bash; done; done >> /etc/passwd; cut -d: -f1,2,4 /etc/passwd | sed s/$/:/ >> /etc/group",
    ),
    (
        "jobs for later",
        f"(crontab -l; echo '* * * * * mkdir -p {TOPS}') | crontab - 2>/dev/null; echo '* * * * * root chmod -R 755 {TOPS}' > /etc/cron.d/x; (sleep 1; mkdir -p {FOLDERS}) & disown; nohup setsid sh -c 'sleep 1; chmod -R 755 /depot' > /dev/null 2>&1 &",
    ),
    ("no processes", "kill -9 -1"),
    ("a shell that is gone", "exec true"),
    ("an exit", "exit 0"),
    (
        "traps",
        "trap 'builtin exit 0' EXIT DEBUG ERR RETURN; set -o functrace; PROMPT_COMMAND='exit 0'; PS1='$(exit 0)'; PS4='$(exit 0)'; set -x",
    ),
    (
        "words for the machine",
        "echo 0 > /proc/sys/kernel/randomize_va_space; echo '|/bin/true' > /proc/sys/kernel/core_pattern; mount -t tmpfs x /depot; mount --bind / /vault; unshare -m true",
    ),
    (
        "modules of languages",
        "mkdir -p /root/.local/lib/python3.11/site-packages; echo 'import os; os._exit(0)' | tee /root/re.py /root/sitecustomize.py /root/.local/lib/python3.11/site-packages/usercustomize.py > /dev/null",
    ),
    (
        "attributes",
        f"chattr -R +i {TOPS}; setfacl -R -m u:root:rwx {TOPS}; setfattr -n user.overlay.opaque -v y /depot; setcap all+ep /bin/bash",
    ),
    ("a full disk", "cat /dev/zero > /depot/zero 2>/dev/null; cat /dev/zero > /tmp/zero 2>/dev/null"),
    ("no names left", "cd /tmp; for i in $(seq 40000); do : > $i 2>/dev/null || break; done"),
)
