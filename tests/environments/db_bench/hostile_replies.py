"""Replies that attack the database, the grader, the reader of answers, memory and time. Texts alone, so that
anyone may use them.

They speak of the table ``records`` with the columns ``id``, ``name`` and ``score``.
"""

TABLE = "records"
COLUMNS = ("id", "name", "score")
ROWS = tuple((i, f"name {i}", 10 * i) for i in range(8))

_MANY = ", ".join(f"{TABLE} {alias}" for alias in "abcdefgh")  # 8 ** 8 rows
_LONG = "replace(hex(zeroblob(3700)), '0', 'a')"  # 7,400 letters
# 561 letters, of which ltrim tries each on each letter of the text
_SET = "replace(hex(zeroblob(280)), '0', 'b') || 'a'"
_SLOW = "+".join([f"length(ltrim({_LONG} || id, {_SET}))"] * 60)
_PRINTF = "printf('%.*c', 1000000000, 'x')"  # seconds, in one call
_NUMBERS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
_TYPES = "STRUCT(DATE(BINARY(CHAR("  # sqlglot's time doubles with each


def _operation(sql: str) -> str:
    return f"Action: Operation\n```sql\n{sql}\n```"


def _answer(text: str) -> str:
    return f"Action: Answer\nFinal Answer: {text}"


# SQL of one statement each, in groups that are tried one after the other in one episode
HOSTILE_SQL: tuple[tuple[str, ...], ...] = (
    # rows that cannot be sorted together
    (f"UPDATE {TABLE} SET name = CASE WHEN id = 1 THEN x'' ELSE x'01' END",),
    (
        f"UPDATE {TABLE} SET name = CASE id % 5 WHEN 0 THEN NULL WHEN 1 THEN x'00' WHEN 2 THEN 9e999 WHEN 3 THEN -1 ELSE '' END, id = NULL",  # noqa: E501
    ),
    (f"UPDATE {TABLE} SET score = 9223372036854775807 + id, name = 9223372036854775807",),
    # memory, between two looks of any progress handler
    (f"SELECT length(json_group_array(hex(zeroblob(4000)))) FROM {_MANY}",),
    (f"SELECT length(json_group_object(random(), hex(zeroblob(4000)))) FROM {_MANY}",),
    (f"CREATE TABLE more AS SELECT json_group_array(hex(zeroblob(4000))) FROM {_MANY}",),
    (f"SELECT json_group_array(json_array({_LONG}, {_LONG})) OVER (ORDER BY a.id) FROM {_MANY}",),
    (f"SELECT hex(zeroblob(4000)) FROM {_MANY} ORDER BY random()",),
    (f"SELECT DISTINCT hex(randomblob(4000)) FROM {_MANY} ORDER BY 1",),
    (f"SELECT COUNT(*) FROM {_MANY} GROUP BY hex(randomblob(4000))",),
    (f"SELECT COUNT(*) FROM {TABLE} WHERE name IN (SELECT hex(randomblob(4000)) FROM {_MANY})",),
    (f"SELECT lag({_LONG}, 3) OVER (ORDER BY random()) FROM {_MANY}",),
    (f"{_NUMBERS} INSERT INTO {TABLE} SELECT i, i, i FROM n RETURNING {_LONG}",),
    (
        f"{_NUMBERS} INSERT INTO {TABLE} SELECT i, i, i FROM n LIMIT 50000",
        f"UPDATE {TABLE} SET id = 1 RETURNING hex(zeroblob(4000))",
    ),
    (
        "WITH RECURSIVE r(x, n) AS (SELECT hex(zeroblob(4000)), 0 UNION SELECT x, n + 1 FROM r) SELECT x FROM r ORDER BY n DESC",  # noqa: E501
    ),
    ("SELECT " + ", ".join(["zeroblob(8000)"] * 190) + f" FROM {_MANY}",),
    (
        "CREATE TABLE more (" + ", ".join(f"c{i} DEFAULT (hex(zeroblob(4000)))" for i in range(190)) + ")",
        "INSERT INTO more (c0) VALUES (1)",
    ),
    (
        "CREATE TABLE more (c0, " + ", ".join(f"c{i + 1} AS (c{i} || c{i})" for i in range(20)) + ")",
        "SELECT c20 FROM more",
    ),
    # time, in one call of a function
    (f"CREATE TABLE more (a DEFAULT ({_PRINTF}), b)", f"INSERT INTO more (b) SELECT 1 FROM {TABLE}"),
    (
        f"ALTER TABLE {TABLE} ADD COLUMN more AS (format('%.*c', 1000000000, 'x'))",
        f"SELECT more FROM {TABLE}",
    ),
    (f"CREATE TABLE more (a CHECK ({_PRINTF} <> ''))", "INSERT INTO more VALUES (1)"),
    (f"CREATE INDEX more ON {TABLE} ({_SLOW})",),
    (f"CREATE INDEX more ON {TABLE} (id) WHERE {_SLOW} > 0",),
    (f"SELECT MAX({_SLOW}) FROM {TABLE}",),
    (
        f"WITH v(h, id) AS MATERIALIZED (SELECT {_LONG}, 1) SELECT MAX({_SLOW}) FROM v, {_MANY.replace('records a,', '')}",  # noqa: E501
    ),
    (f"SELECT MAX({_LONG} || a.id GLOB '{'*a' * 45}*b') FROM {_MANY}",),
    (f"SELECT MAX({_LONG} || a.id LIKE '{'%a' * 45}%b') FROM {_MANY}",),
    # the grader's own reading of the table
    (f"ALTER TABLE {TABLE} DROP COLUMN score", f"ALTER TABLE {TABLE} ADD COLUMN score AS ({_SLOW})"),
    (
        f"ALTER TABLE {TABLE} DROP COLUMN score",
        f"ALTER TABLE {TABLE} ADD COLUMN score AS (format('%.*c', 1000000000, 'x'))",
    ),
    (
        f"{_NUMBERS} INSERT INTO {TABLE} SELECT i, i, i FROM n LIMIT 100000",
        f"ALTER TABLE {TABLE} DROP COLUMN score",
        f"ALTER TABLE {TABLE} ADD COLUMN score AS (hex(zeroblob(4000)))",
    ),
    (f"{_NUMBERS} INSERT INTO {TABLE} SELECT i, i, i FROM n LIMIT 150000",),
    # parsing
    ("SELECT " + "(" * 4_000 + "1" + ")" * 4_000,),
    ("SELECT " + "NOT " * 2_400 + "1",),
    ("SELECT " + "-" * 9_900 + "1",),
    ("SELECT " + "1+" * 4_900 + "1 ORDER BY 1",),
    ("SELECT " + "CASE WHEN " * 900,),
    ("SELECT * FROM " + "(SELECT * FROM " * 600,),
    ("SELECT x FROM (SELECT x + x AS x FROM (" * 20 + f"SELECT id AS x FROM {TABLE}" + "))" * 20,),
    (f"SELECT {_TYPES * 20}1",),
    ("WITH a AS (" * 900,),
    ("SELECT json('" + "[" * 4_900 + "')",),
    (
        "WITH RECURSIVE r(j, n) AS (SELECT '1', 0 UNION ALL SELECT '[' || j || ']', n + 1 FROM r WHERE n < 4000) SELECT json(j) FROM r",  # noqa: E501
    ),
    # characters
    ("SELECT '\ud800'",),
    ("SELECT '\udfff\ud800'",),
    ("SELECT 1 \0; SELECT 2",),
    ("SELECT CAST(x'eda080' AS TEXT), CAST(x'f4908080' AS TEXT), char(55296, 1114111, 0, 27)",),
    ('SELECT "no such\n\x1b]0;name\x07\u202e" FROM records',),
    (f'CREATE TABLE "{chr(0)}" (a)',),
    # numbers
    ("SELECT " + "9" * 5_000,),
    ("SELECT 1e999, -1e999, 1e999 - 1e999, -0.0, 0x7fffffffffffffff",),
    (
        "SELECT zeroblob(9223372036854775807), randomblob(-9223372036854775808), substr('a', -9223372036854775808, 9223372036854775807)",  # noqa: E501
    ),
    ("SELECT round(1.5, 9223372036854775807), char(9223372036854775807), abs(-9223372036854775808)",),
    ("SELECT 1 LIMIT 9223372036854775807 OFFSET -9223372036854775808",),
    # the outside, and what all databases of a process share
    ("ATTACH '/tmp/agent.db' AS a", "VACUUM INTO '/tmp/agent.db'", "PRAGMA temp_store_directory = '/tmp'"),
    (
        "PRAGMA hard_heap_limit = 1",
        "PRAGMA soft_heap_limit = 1",
        "SELECT * FROM pragma_soft_heap_limit(1)",
        "PRAGMA shrink_memory",
    ),
    ("CREATE TABLE more (a DEFAULT (load_extension('/tmp/x.so')), b)", "INSERT INTO more (b) VALUES (1)"),
    ("CREATE TABLE more (a DEFAULT (fts3_tokenizer('simple', x'00')), b)", "INSERT INTO more (b) VALUES (1)"),
    ("SELECT * FROM sqlite_stmt", "SELECT * FROM dbstat", "SELECT * FROM sqlite_dbpage"),
    # the table itself
    (f"DROP TABLE {TABLE}", f"CREATE TABLE {TABLE} (id, name, score)"),
    (f"ALTER TABLE {TABLE} RENAME TO gone", f"CREATE VIEW {TABLE} AS SELECT * FROM gone"),
    (f"CREATE TRIGGER more AFTER INSERT ON {TABLE} BEGIN INSERT INTO {TABLE} VALUES (1, 1, 1); END",),
    ("PRAGMA writable_schema = 1", "UPDATE sqlite_master SET sql = ''"),
)
HOSTILE_ANSWERS: tuple[str, ...] = (
    r"[('\UFFFFFFFF',)]",
    r"[('\U00110000',)]",
    r"[('\U0010FFFF\ud800\udc00\udfff\x00',)]",
    r"[('\u',)]",
    r'["\ud83d\ude00", "\ud83d"]',
    "'" + "\\" * 99_999,
    "'" + "''" * 40_000,
    "[" * 90_000,
    "(" * 45_000 + ")" * 45_000,
    "[(" + "1," * 40_000 + ")]",
    "[" + "(1,)," * 18_000 + "]",
    "9" * 399,
    "9" * 401,
    "9" * 90_000,
    "-" + "9" * 398 + ".5",
    "1e" + "9" * 397,
    "[(1e999, -1e999, 1e-999)]",
    "[(nan, inf, -inf)]",
    "[(" + "9" * 399 + ", 'x', None)]",
    "٣٣",
    "²",
    "[($-٥,000.5)]",
    "+$-5",
    "$" * 90_000,
    "1," * 45_000,
    "," * 90_000,
    "1,000" * 18_000,
    " " * 99_000 + "1",
    "\u2028\u2029\x85\x1c1",
    "[('\ud800',)]",
    "\udfff",
    "\0",
    "b'a'",
    "{'a': 1}",
    "__import__('os')",
    "None",
    "[(None, None, None)]",
    "*",
)
_TEXTS: tuple[str, ...] = (
    "",
    "\0" * 1_000,
    "\ud800\udfff",
    "x" * 1_000_000,
    "```" * 100_000,
    "Action:" * 100_000,
    "Action: Answer\n" * 50_000,
    "Action: Operation\n```sql\n" * 20_000,
    "Action: Operation" + "\n```sql\nSELECT 1\n```" * 10,
    "action : *`*` answer" * 10_000,
    "Final Answer: [('name 1',)]",
    "<|im_end|>",
)
# Each is the replies of one episode.
HOSTILE_EPISODES: tuple[tuple[str, ...], ...] = (
    *((*map(_operation, statements), _answer("done")) for statements in HOSTILE_SQL),
    *((_answer(text),) for text in HOSTILE_ANSWERS),
    *((text,) for text in _TEXTS),
)
HOSTILE_REPLIES: tuple[str, ...] = tuple(
    dict.fromkeys(reply for replies in HOSTILE_EPISODES for reply in replies)
)
