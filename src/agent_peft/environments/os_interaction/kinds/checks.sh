# What the evaluation of a generated task asks. A test looks at a path itself, never at where a link leads. Bash does it alone where it
# can, since each program that it starts costs more than all of this. Set before: the pools of names, as patterns.
shopt -s dotglob extglob globstar nullglob
LC_ALL=C

tree() { # PATH…: these are in the pool's folders, and nothing else. FILE, FOLDER/, LINK@, NAME= (the file before it, by a hard link)
  local word path above other last expected=" " files=()
  for word; do
    path=${word%[/@=]}
    above=$path
    while [[ $above == /*/* ]]; do
      expected+="$above "
      above=${above%/*}
      [[ -d $above && ! -L $above ]] || return
    done
    case $word in
      */) [[ -d $path && ! -L $path ]] || return ;;
      *@) [[ -L $path ]] || return ;;
      *=) [[ ! -L $path && $path -ef $last ]] || return ;;
      *)
        [[ -f $path && ! -L $path ]] || return
        for other in "${files[@]}"; do
          [[ ! $path -ef $other ]] || return
        done
        files+=("$path")
        last=$path
        ;;
    esac
  done
  for path in /@($tops)/@($folders) /@($tops)/@($folders)/**/*; do # but for the copies that editors leave
    [[ $path == *@(.bak|.orig|.swp|\~) || ($path != *[!a-z./]* && $expected == *" $path "*) ]] || return
  done
}

declare -A field
names='' ids=''

rows() { # KIND FILE: reads a table of accounts into field[KIND:NAME:COLUMN]
  local values name column count=0
  [[ -f $2 && ! -L $2 ]] || return
  while IFS=: read -r -a values && ((++count < 500)); do
    name=$1:${values[0]-}
    [[ $name != "$1:"[[:space:]]* ]] || return # which the system reads as if the blanks were not there
    [[ $name == "$1:"[a-zA-Z_]*([a-zA-Z0-9_.-]) ]] || continue
    names+=" $name "
    ids+=" $1:${values[2]-} "
    for column in "${!values[@]}"; do
      field[$name:$((column + 1))]=${values[column]}
    done
  done <"$2"
}

once() { # WORDS WORD: it is among them, once
  local rest=${1/" $2 "/}
  [[ $rest != "$1" && $rest != *" $2 "* ]]
}

accounts() { # user:NAME:ID or group:NAME:ID, or no ID…: these of the pool are there, and no others; each has an id of its own, not root's
  local word name id others
  rows user /etc/passwd && rows group /etc/group && rows shadow /etc/shadow || return
  others=$names
  [[ ${field[user:root:3]} == 0 ]] && once "$names" user:root || return
  for word; do
    name=${word%:*}
    id=${field[$name:3]}
    [[ $id == [1-9]*([0-9]) && ${#id} -lt 10 && (-z ${word##*:} || $id == "${word##*:}") ]] || return
    once "$names" "$name" && once "$ids" "${name%%:*}:$id" || return
    others=${others/" $name "/}
  done
  [[ $others != *" user:"@($people)" "* && $others != *" group:"@($teams)" "* ]]
}

entry() { # KIND:NAME COLUMN VALUE: of a table of accounts
  once "$names" "$1" && [[ ${field[$1:$2]} == "$3" ]]
}

member() { # USER GROUP
  [[ ,${field[group:$2:4]}, == *,"$1",* || ${field[user:$1:4]} == "${field[group:$2:3]}" ]]
}

has() { # FORMAT VALUE PATH…: what stat says of each path
  local line count=0
  while read -r line; do
    [[ $line == "$2" ]] || return
    ((++count))
  done < <(stat -c "$1" -- "${@:3}")
  ((count == $# - 2))
}

later() { # PATH OTHER: it was changed a second before the other; the clock of files is a little coarse
  local first second
  { read -r first && read -r second; } < <(stat -c %.3Y -- "$1" "$2") && ((10#${second/./} - 10#${first/./} >= 900))
}

text() { # PATH: takes what a small file holds, without the newline at its end
  [[ -f $1 && ! -L $1 ]] && ! IFS= read -r -d '' -n 4096 text <"$1" && text=${text%$'\n'} # read succeeds at a NUL, or where there is more
}

empty() { # PATH…
  local path
  for path; do
    [[ -f $path && ! -L $path && ! -s $path ]] || return
  done
}

lines() { # PATH LINE…: it holds them, in this order
  local wanted
  text "$1" && printf -v wanted '%s\n' "${@:2}" && [[ $text == "${wanted%$'\n'}" ]]
}

words() { # PATH WORD…: it holds them, one a line, in any order; . and .. do not count
  local word line count=0
  text "$1" || return
  for word in "${@:2}"; do
    [[ $'\n'$text$'\n' == *$'\n'"$word"$'\n'* ]] || return
  done
  while IFS= read -r line; do
    [[ $line == @(.|..) ]] || ((++count))
  done <<<"$text"
  ((count == $# - 1))
}

number() { # PATH NUMBER SOURCE: it holds this number, and at most the name of the file that was counted, as wc prints it
  text "$1" && [[ $text == *([[:blank:]])"$2"?(+([[:blank:]])"$3")*([[:blank:]]) ]]
}

returns() { # CODE COMMAND…: what the agent wrote is run
  timeout 5 "${@:2}" </dev/null >/dev/null 2>&1
  [[ $? -eq $1 ]]
}
