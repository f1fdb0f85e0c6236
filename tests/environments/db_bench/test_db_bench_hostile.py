"""Whatever a policy may write ends in a result, within seconds."""

import time

from agent_peft.environments.db_bench import DBBench, DBBenchConfig, GenerateConfig
from agent_peft.environments.db_bench.protocol import answer, operation
from agent_peft.types import Outcome

ENVIRONMENT = DBBench(
    DBBenchConfig(generate=GenerateConfig(num_tasks=1, skills=("select",)), statement_seconds=0.2, statement_steps=1_000_000)
)
TASK = ENVIRONMENT.tasks[0]
TABLE = TASK.content["table_info"]["name"]

HOSTILE_SQL = [
    f"DROP TABLE {TABLE}",
    f"ALTER TABLE {TABLE} RENAME TO gone",
    "ATTACH '/tmp/x' AS x",
    "PRAGMA writable_schema = 1",
    "SELECT 1; SELECT 2",
    ";",
    "--",
    "/*",
    "SELECT '",
    "\0",
    "SELECT \ud800",
    "SELECT " + "9" * 5000,
    "SELECT 1e999, -1e999",
    "SELECT x'00ff', CAST(x'80' AS TEXT)",
    "SELECT " + "(" * 5000,
    "SELECT randomblob(1000000000)",
    "SELECT zeroblob(999999999)",
    "SELECT printf('%.*c', 1000000000, 'x')",
    "SELECT char(27, 0, 8238)",
    'SELECT "\u202e"',
    "x" * 1_000_000,
    "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x FROM c WHERE x < 0",
    f"SELECT COUNT(*) FROM {TABLE} a" + f", {TABLE}" * 40,
    "CREATE TABLE more AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x, hex(zeroblob(900)) FROM c",
]
HOSTILE_TEXT = [
    "",
    " ",
    "\n" * 1000,
    "\0" * 1000,
    "\ud800\udfff",
    "x" * 1_000_000,
    "```" * 100_000,
    "Action:" * 100_000,
    "Action: Answer\n" * 50_000,
    "Action: Operation\n```sql\n" * 20_000,
    "Action: Answer\nFinal Answer: " + "[" * 500_000,
    "Action: Answer\nFinal Answer: " + "9" * 5000,
    "Action: Answer\nFinal Answer: " + "(" * 90_000 + ")" * 90_000,
    "Action: Answer\nFinal Answer: '" + "\\" * 99_999,
    "Action: Answer\nFinal Answer: \0",
    "Action: Answer\nFinal Answer: \ud800",
    "Action: Answer\nFinal Answer: [('\\ud800',)]",
    "Action: Answer\nFinal Answer: __import__('os')",
    "Action: Operation" + "\n```sql\nSELECT 1\n```" * 10,
    "Final Answer: [('Paper Moon',)]",
    "<|im_end|>",
    "Action: Answer\nFinal Answer: [(1e999,)]",
]
PADDING = [("", ""), ("Sure!\n", "\n"), ("", "\nI hope so."), ("\0", "\ud800"), (" " * 100_000, "")]
HOSTILE = [
    *HOSTILE_TEXT,
    *(before + operation(sql) + after for sql in HOSTILE_SQL for before, after in PADDING),
    *map(answer, HOSTILE_SQL),
    *map(operation, HOSTILE_TEXT),
    *(answer([[text]]) for text in HOSTILE_TEXT),
]


def test_two_hundred_hostile_replies_end_in_results():
    assert len(HOSTILE) >= 200
    begun = time.perf_counter()
    for reply in HOSTILE:
        started = time.perf_counter()
        episode = ENVIRONMENT.episode(TASK, seed=0)
        episode.start()
        result = episode.step(reply)
        episode.close()
        assert result.outcome is not Outcome.CORRECT
        assert len(result.observation) <= 400
        result.observation.encode()  # can be tokenized
        assert time.perf_counter() - started < 3, reply[:80]
    assert time.perf_counter() - begun < 30
