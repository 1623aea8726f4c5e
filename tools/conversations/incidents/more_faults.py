"""More of what can be wrong: locks, queues, caches, names, clocks and crowds.

The marks are those of `faults`. Must not know: how the search is told.
"""

from __future__ import annotations

from conversations.incidents.faults import SLOW, TIMEOUTS, Fault
from conversations.incidents.world import Level

LOCK = Fault(
    "[A job holds a lock on <table>|<table> is locked]",
    "[statements that wait for a lock|waiting statements in <database>]",
    "[no waiting statements|no locks]",
    "database",
    (
        "UPDATE of <subject> {user} took {ms} ms",
        "POST /<subject>s req={id} status=503, gave up waiting for <table>",
        "save of <subject> {user} retried {n} times",
    ),
    SLOW,
    "warning",
    (
        "process {user} still waiting for RowExclusiveLock on <table> after {ms} ms",
        "process {user} still waiting for RowExclusiveLock on <table> after {ms} ms",
        "{n} processes wait for <table>",
    ),
    "process {user} (<client>) holds AccessExclusiveLock on <table> since <at>",
    ("checkpoint complete, wrote {n} buffers", "connection {conn} of <other> idle", "statistics of <table> written"),
    Level("waiting_statements", "statements", (0, 3), (60, 240)),
    (
        'One process blocks all others: "<line>". The waiting statements go from <before> at <till> to <after> at '
        "<from>.",
        "Statements pile up behind a lock, <after> at <from> after <before> at <till>. It belongs to <client>: "
        '"<line>".',
    ),
    "client",
    "version",
    "[Clean up <table> every night and day|Rebuild <table> after each import]",
    "<client> <version>, out since <guilty_at>, locks the whole of <table> while it works. That is the mechanism. 90 "
    "%.",
    "<client> <version> locks <table> while it cleans up",
    "stop the job of <client>, its lock goes with it",
    "the clean-up starts again from the beginning",
    "clean up in small batches without a lock on the table",
)

POISON = Fault(
    "[One message stops <client>|A message in <queue> cannot be handled]",
    "[the same message again and again|one id that returns]",
    "[different messages, each handled once|messages that are handled once]",
    "client",
    (
        "<subject> {user} not processed yet, asked {n} times",
        "GET /<subject>s/{user} req={id}: state is older than {n} minutes",
        "export of <subject> {user} still waiting",
    ),
    Level("oldest_pending_minutes", "minutes", (0.5, 2.0), (35, 80), gradual=True),
    "error",
    (
        "message <id> failed: KeyError '<column>', sent back to <queue>",
        "message <id> failed: KeyError '<column>', sent back to <queue>",
        "worker {conn} restarted",
    ),
    "message <id> delivered for the {user}th time",
    ("message {id} failed once, done on the second try", "worker {conn} restarted", "slow message {id}: {ms} ms"),
    Level("queue_depth", "messages", (4, 30), (2100, 9800), gradual=True),
    (
        'The message <id> comes back each time: "<line>". Meanwhile the queue grows from <before> messages at <till> '
        "to <last> at <until>.",
        "The queue holds <last> messages at <until>, <before> at <till>, because <client> tries one message without "
        'end: "<line>".',
    ),
    "other",
    "version",
    "[Leave <column> out if it is empty|Send <subject>s without <column>]",
    "<other> <version> may leave <column> out since <guilty_at>, and <client> cannot read such a message. 85 %.",
    "<other> <version> sends a message without <column> that <client> cannot read",
    "move message <id> aside, the rest follows by itself",
    "one <subject> has to be entered again by hand",
    "let <client> put a message aside after five tries",
)

EVICTION = Fault(
    "[<cache> throws entries away|<cache> is full]",
    "[evictions, and memory at its limit|many evictions on <cache>]",
    "[no evictions|memory well below the limit]",
    "cache",
    (
        "<subject> {user} not in <cache>, read from <database> in {ms} ms",
        "<subject> {user} not in <cache>, read from <database> in {ms} ms",
        "{n} reads of <database> waiting",
    ),
    SLOW,
    "info",
    (
        "used_memory at maxmemory, policy allkeys-lru, evicted {n}",
        "client <victim> cmd=SET key=<subject>:{id}",
        "slowlog: GET <subject>:{id} {ms} us",
    ),
    "memory by prefix: tmp: {n} GiB, no time to live; <subject>: 2 GiB",
    ("client <victim> cmd=GET key=<subject>:{id}", "snapshot written in {ms} ms", "client <other> connected"),
    Level("evicted_keys_per_minute", "keys", (0, 0), (1800, 9400)),
    (
        '<cache> evicts <after> keys a minute since <from>, and <before> before. One prefix fills it: "<line>".',
        "There were <before> evictions a minute until <till> and <after> at <from>. The memory belongs to another "
        'prefix: "<line>".',
    ),
    "other",
    "version",
    "[Keep drafts in <cache>|Store previews under tmp: in <cache>]",
    "<other> <version> writes keys with the prefix tmp: since <guilty_at>, without a time to live. They push the "
    "<subject>s out. 90 %.",
    "<other> <version> fills <cache> with keys that never expire",
    "roll <other> back, then delete the keys with the prefix tmp:",
    "drafts of the last hours are lost",
    "a time to live for every key",
)

RESOLVER = Fault(
    "[Names cannot be resolved on <node>|The resolver of <node> fails]",
    "[failed lookups on one node|lookups that fail on <node>]",
    "[lookups that work on every node|no failed lookups]",
    "node",
    (
        "call to <other> failed: could not resolve host",
        "req={id} status=502 after {n} ms",
        "call to <other> failed: could not resolve host, instance on <node>",
    ),
    TIMEOUTS,
    "error",
    (
        "lookup of <other> timed out after {ms} ms",
        "lookup of <database> timed out after {ms} ms",
        "resolver answered SERVFAIL for <other>",
    ),
    "resolver process exited, {n} lookups dropped",
    ("image of <client> pulled in {ms} ms", "pod of <other> started", "clock adjusted by {n} ms"),
    Level("failed_lookups_per_minute", "lookups", (0, 2), (140, 620)),
    (
        'Only <node> has it: "<line>". Failed lookups go from <before> to <after> a minute at <from>.',
        'The resolver of <node> is gone: "<line>". <after> lookups a minute fail since <from>, <before> did at <till>.',
    ),
    "",
    "",
    "",
    "No deploy fits, and only one node is concerned, so a change is unlikely. The process on <node> has simply ended.",
    "the resolver on <node> has ended",
    "move the instances away from <node> and restart it",
    "the other nodes are fuller for some minutes",
    "an alarm if a resolver ends",
)

MANY_READS = Fault(
    "[<victim> reads far more than before|Each request makes many queries]",
    "[many small statements per request|a high number of statements]",
    "[as many statements as before|a flat number of statements]",
    "victim",
    (
        "GET /<subject>s?page={n} req={id} took {ms} ms",
        "GET /<subject>s req={id} took {ms} ms",
        "GET /<subject>s?page={n} req={id} status=503",
    ),
    SLOW,
    "info",
    (
        "trace req={id} {user} statements, database {ms} ms, rest 12 ms",
        "trace req={id} {user} statements, database {ms} ms, rest 9 ms",
        "trace req={id} flag <subject>_names=on",
    ),
    "trace req={id} SELECT name FROM <table> WHERE id = $1 ({user} times)",
    (
        "trace req={id} 3 statements, database {n} ms, rest 11 ms",
        "trace req={id} 2 statements, database {n} ms, rest 9 ms",
    ),
    Level("statements_per_second", "statements", (200, 600), (7000, 21000)),
    (
        'One statement is run for each row: "<line>". The statements per second go from <before> to <after> at <from>.',
        "The expectation is met: <after> statements per second at <from>, <before> at <till>. The trace shows one per "
        'row: "<line>".',
    ),
    "victim",
    "config",
    "[Switch the flag <subject>_names on for all|Flag <subject>_names: from 5 to 100 percent]",
    "The flag <subject>_names is on for everybody since <guilty_at>, and it reads a name for each row. 95 %.",
    "the flag <subject>_names makes <victim> read each row by itself",
    "switch the flag <subject>_names off",
    "none, names are shown as numbers again",
    "read the names in one statement before it is switched on again",
)

CROWD = Fault(
    "[A crawler asks without pause|The load has grown]",
    "more requests at <gateway>",
    "[a flat number of requests|as many requests as on other days]",
    "gateway",
    (
        "GET /<subject>s?page={user} req={id} took {ms} ms",
        "GET /<subject>s?page={user} req={id} took {ms} ms",
        "queue of requests is {n} deep",
    ),
    SLOW,
    "info",
    (
        "top agents of the last minute: harvest-bot {n} %",
        "GET /<subject>s?page={user} agent=harvest-bot/2.1",
        "rate limit hit: {n} requests refused",
    ),
    "agent harvest-bot/2.1 made {user} requests in the last minute",
    (
        "top networks of the last minute: 3.1 % 2.8 % 2.2 %",
        "rate limit hit: {n} requests refused",
        "reload of routes done",
    ),
    Level("requests_per_minute", "requests", (700, 2600), (9000, 32000)),
    (
        "The requests go from <before> a minute at <till> to <after> at <from>, and one client makes most of them: "
        '"<line>".',
        'There are <after> requests a minute since <from>, <before> before. It is a crawler: "<line>".',
    ),
    "",
    "",
    "",
    "No change of ours fits. The crawler came by itself, and the rate limit does not know its many addresses.",
    "harvest-bot asks for every page of the <subject>s",
    "refuse harvest-bot at <gateway>",
    "a search engine may show old <subject>s",
    "a rate limit for each agent",
)

MORE_FAULTS: tuple[Fault, ...] = (LOCK, POISON, EVICTION, RESOLVER, MANY_READS, CROWD)
