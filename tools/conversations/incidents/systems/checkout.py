"""The system that takes payments: what can be wrong with it, save what the example's incident asks about."""

from __future__ import annotations

from conversations.incidents.systems.system import System, Trouble
from conversations.incidents.world import Level

ERRORS = Level("error_rate", "percent", (0.1, 0.7), (4.0, 21.0))
SLOW = Level("p99", "ms", (140, 420), (2100, 5200))
FEWER = Level("orders_per_minute", "orders", (180, 640), (8, 70))

STOCK = Trouble(
    "[A lock in stock-service|Reservations wait for a lock]",
    "reservations in stock-service that take seconds",
    "[reservations as fast as ever|reservations that take milliseconds]",
    (
        "POST /checkout req={id} shop={user} status=503 stock-service: no answer in 3000 ms",
        "POST /checkout req={id} failed after 3000 ms: reservation of {n} items timed out",
        "POST /checkout req={id} shop={user} stock answered in {ms} ms, retried once",
    ),
    SLOW,
    "[Support hears|Shops write] that the basket [hangs|is stuck] before paying.",
    "stock-service",
    "warning",
    (
        "reserve req={id} {n} items: waited {ms} ms for row lock",
        "reserve req={id} {n} items: waited {ms} ms for row lock",
        "reserve req={id} given up, holder is transaction {user}",
    ),
    "row lock held by transaction {user} (recount-all) since {n} minutes",
    ("reserve req={id} {n} items in {ms} ms", "release req={id} {n} items in {ms} ms"),
    Level("reserve_p95", "ms", (12, 40), (1900, 2900)),
    "[Both expectations are met|The expectation is met]. Reservations wait for a row lock, and their 95th percentile "
    'goes from <before> ms at <till> to <after> ms at <from>. The line that decides: "<line>".',
    "A recount should not run in the day. I look at what stock-service says of it.",
    "stock-service",
    "info",
    ("recount-all: warehouse {conn} done in {ms} ms", "recount-all: {n} % done, one transaction"),
    "recount-all started with scope=all, expected scope=changed",
    'The log has "<line>". The recount covers all warehouses in one transaction and holds every row until it ends. '
    "The cause is clear enough to act on.",
    "stock-service",
    "config",
    "[Recount all warehouses, not the changed ones|Start the recount at daytime]",
    "At <guilty_at> the recount of stock-service was changed. It holds the rows that reservations need, which is a "
    "mechanism. I am about 90 % sure.",
    "reservations wait for the recount of stock-service, which holds all rows since <guilty_at>",
    "stop the recount and undo its setting; the counts are then a day old",
    "let the recount commit after each warehouse",
)
PRICES = Trouble(
    "The price lists have left Redis",
    "misses in redis-prices and lists read from Postgres",
    "a hit rate above 95 percent",
    (
        "POST /checkout req={id} shop={user} prices read from postgres in {ms} ms",
        "POST /checkout req={id} shop={user} status=503 after {ms} ms, price list missing",
        "price list of shop={user} not in redis, {n} requests wait for it",
    ),
    SLOW,
    "[The cart page hangs for most shops.|Support has a dozen tickets.|Shops say that the total appears late.]",
    "redis-prices",
    "info",
    (
        "expired prices:{user} after 60 s",
        "expired prices:{user} after 60 s",
        "client checkout-api-{conn} cmd=GET key=prices:{user} miss",
    ),
    "expired {user} keys with prefix prices: within one second",
    ("client checkout-api-{conn} cmd=GET key=prices:{user} hit", "used_memory 3.{n}G maxmemory 12.00G"),
    Level("hit_rate", "percent", (97.0, 99.0), (11.0, 34.0)),
    "The hit rate falls from <before> percent at <till> to <after> percent at <from>, and the log says why: "
    '"<line>". [The hypothesis holds.|All lists expire together.]',
    "I want to see where a request spends its time, so I look at checkout-api itself.",
    "checkout-api",
    "info",
    ("trace req={id} auth 4 ms, prices {ms} ms, stock 30 ms", "trace req={id} auth 5 ms, prices {ms} ms, stock 27 ms"),
    "trace req={id} prices: {n} identical reads of one list at once",
    'Prices take nearly all of the time, and one trace has "<line>". Each request reads the list again instead of '
    "waiting for the first. The mechanism is complete.",
    "checkout-api",
    "version",
    "[Load all price lists at the start|Warm up the price lists in one go]",
    "checkout-api <version> loads all lists at once since <guilty_at>, so they all expire together. "
    "That is a mechanism: 85 %.",
    "all price lists expire in Redis in the same second, and every request reads them from Postgres",
    "roll checkout-api back to the version before <version>; the first requests are slow",
    "let each list expire at a time of its own",
)
SECRET = Trouble(
    "[cardbridge does not accept our key|Our key for cardbridge is wrong]",
    "answers with status 401 in payment-adapter",
    "[no status 401|only the usual declines]",
    (
        "POST /checkout req={id} shop={user} status=502 payment-adapter: not authorized",
        "POST /checkout req={id} payment refused before the bank, {n} today",
        "POST /checkout req={id} shop={user} status=502 after {ms} ms",
    ),
    FEWER,
    "[Every card is refused at once|Nobody can pay by card], invoices work.",
    "payment-adapter",
    "warning",
    (
        "authorize req={id} provider=cardbridge status=401 in {ms} ms",
        "authorize req={id} provider=cardbridge status=401 in {ms} ms",
        "capture req={id} postponed, {n} waiting",
    ),
    "cardbridge: key ending in {n} was revoked",
    ("webhook req={id} arrived twice, ignored", "authorize req={id} provider=cardbridge status=402 declined"),
    Level("unauthorized_per_minute", "answers", (0, 0), (90, 420)),
    'cardbridge answers 401 to everything, <after> times a minute since <from> and never before. The log has "<line>", '
    "so it is the key.",
    "I look at what payment-adapter says when it reads its key.",
    "payment-adapter",
    "info",
    ("instance {conn} ready in {ms} ms", "provider=cardbridge key read from vault, version {n}"),
    "key of cardbridge is older than the one in the vault, restart needed",
    'One line explains it: "<line>". The new key is there, but the instances still hold the old one. I am 95 % sure.',
    "payment-adapter",
    "config",
    "[Rotate the key of cardbridge|New key for cardbridge in the vault]",
    "At <guilty_at> the key of cardbridge was rotated. The instances read it only when they start, so they still send "
    "the old one. 95 %.",
    "cardbridge refuses every payment, because payment-adapter still sends the key from before <guilty_at>",
    "restart payment-adapter one instance at a time; a few payments will be retried",
    "read the key again after a 401",
)
DISK = Trouble(
    "The disk of postgres-orders is full",
    "[failed writes in postgres-orders|writes that fail, and no free disk]",
    "free disk on postgres-orders",
    (
        "POST /checkout req={id} shop={user} status=500 order not written",
        "POST /checkout req={id} could not commit after {ms} ms",
        "POST /checkout req={id} shop={user} status=500, {n} since the last minute",
    ),
    ERRORS,
    "[Orders can be seen but not placed.|Nobody can place an order, reading works.]",
    "postgres-orders",
    "error",
    (
        "could not extend file base/{user}: no space left on device",
        "could not write to file pg_wal/{id}: no space left on device",
        "checkpoint failed after {ms} ms",
    ),
    "pg_wal keeps {user} files for slot reporting, inactive",
    ("canceling statement of user {user} at its request", "connection {conn} closed by the client"),
    Level("disk_used", "percent", (71.0, 78.0), (99.0, 99.8), gradual=True),
    'The disk is at <before> percent at <till> and at <last> percent at <until>. And "<line>": old log files are '
    "kept for a reader that does not read.",
    "Who is the reader that has stopped? I look at the slots.",
    "postgres-orders",
    "info",
    ("slot archive active, lag {n} MB", "checkpoint complete, wrote {user} buffers in {ms} ms"),
    "slot reporting inactive, lag {user} GB",
    'It is the reporting job: "<line>". The database keeps everything for it until the disk is full. The mechanism is '
    "complete.",
    "postgres-orders",
    "config",
    "[Add a replication slot for reporting|Stop the reporting replica for a test]",
    "A change at <guilty_at> concerns the slot of reporting. Without a reader it keeps all log files. That fills a "
    "disk, 90 %.",
    "postgres-orders cannot write, because its disk is full of log files kept for reporting",
    "drop the slot of reporting; the replica has to be copied anew",
    "a limit for what a slot may keep",
)
GATEWAY = Trouble(
    "The gateway gives up too early",
    "[requests cut off by the gateway|timeouts in the gateway after less than 3 s]",
    "a gateway that waits three seconds",
    (
        "POST /checkout req={id} client closed the connection after 300 ms",
        "POST /checkout req={id} shop={user} answered in {ms} ms, nobody listens",
        "POST /checkout req={id} shop={user} is a retry of {id}",
    ),
    ERRORS,
    "[Some shops are charged twice.|Shops see an error and yet the order is there.]",
    "gateway",
    "warning",
    (
        "upstream checkout-api req={id} timeout after 300 ms, retry",
        "upstream checkout-api req={id} timeout after 300 ms, retry",
        "upstream checkout-api req={id} gave 504, retry was the last",
    ),
    "upstream checkout-api: {n} % of the requests hit the limit of 300 ms",
    ("upstream stock-service req={id} retried once", "client {user} sends an old header"),
    Level("upstream_timeouts_per_minute", "timeouts", (0, 4), (210, 900)),
    'The gateway cuts requests off: <before> a minute at <till>, <after> at <from>. It says "<line>", and a payment '
    "needs more than that.",
    "The limit should be three seconds. I look at what the gateway has loaded.",
    "gateway",
    "info",
    ("route /stock upstream stock-service timeout=3000", "reload by pipeline took {ms} ms"),
    "route /checkout upstream checkout-api timeout=300",
    'The route has "<line>", a zero less than the others. That is a mechanism, and I am 95 % sure.',
    "gateway",
    "config",
    "[Set the timeouts of each route|Move the timeout of /checkout into its route]",
    "At <guilty_at> the timeout of the gateway's routes was changed, and 300 ms is what we see. A rollback of that "
    "setting is small. 95 %.",
    "the gateway cuts off payments after 300 ms and sends them again",
    "undo the setting of the gateway from <guilty_at>; nothing else depends on it",
    "check timeouts in the pipeline, and look for double payments",
)
VOUCHER = Trouble(
    "[Vouchers cost too much time|A voucher check eats the processor]",
    "[long voucher checks, full cores|voucher checks of seconds]",
    "[idle cores|cores that are mostly idle]",
    (
        "POST /checkout req={id} shop={user} status=503 after 3000 ms in voucher",
        "worker {conn} busy for {ms} ms, request queued",
        "POST /checkout req={id} queued behind {n} others",
    ),
    SLOW,
    "[It hits all shops alike.|Shops with a sale are hit most.]",
    "checkout-api",
    "info",
    (
        "voucher req={id} checked in {ms} ms",
        "voucher req={id} checked in {ms} ms",
        "trace req={id} auth 4 ms, voucher {ms} ms, stock 31 ms",
    ),
    "voucher req={id} pattern tried {user}{n} times",
    ("trace req={id} auth 4 ms, voucher 2 ms, stock 31 ms", "voucher req={id} checked in 2 ms"),
    Level("cpu", "percent of one core", (21.0, 38.0), (94.0, 98.0)),
    "The instances use <after> percent of a core since <from>, up from <before>, and vouchers take seconds. One line "
    'tells why: "<line>".',
    "Which vouchers are they? I look at the details.",
    "checkout-api",
    "debug",
    ("voucher pattern ^[A-Z]+-{n}$ matched in {ms} us", "voucher of shop={user} ends in {n} days"),
    "voucher pattern of shop={user} has nested repeats",
    'The log says "<line>". Such a pattern takes longer with every character. The cause is clear enough to act on.',
    "checkout-api",
    "version",
    "[Let shops write their own voucher patterns|Patterns for vouchers]",
    "checkout-api <version> brought patterns for vouchers at <guilty_at>. A bad one keeps a core busy for seconds. I "
    "am about 85 % sure.",
    "checking vouchers takes seconds in checkout-api <version>, and all its cores are busy",
    "roll checkout-api back to the version before <version>; new vouchers stop working",
    "a time limit for a voucher check",
)
CHECKOUT = System(
    "checkout-api",
    "error",
    "gateway -> checkout-api -> (payment-adapter, stock-service, Postgres orders); checkout-api also reads the price "
    "lists from Redis. checkout-api runs with <instances> instances and a pool of <pool> connections each.",
    (2, 2, 2, 5),
    (
        "A campaign has begun: expect more carts; ruled out by flat carts.",
        "One instance is broken: expect its errors; ruled out if all fail.",
        "Postgres failed over: expect a new primary; ruled out by the old one.",
        "The network loses packets: expect resets; ruled out by none.",
    ),
    {
        "gateway": ("client {user} sends an old header", "upstream stock-service req={id} retried once"),
        "checkout-api": ("shop={user} uses version 1 of the API", "POST /checkout req={id} has an empty note"),
        "stock-service": ("item {user} has no warehouse, using 1", "reserve req={id} asks for {n} of a single item"),
        "payment-adapter": ("webhook req={id} arrived twice, ignored", "refund req={id} is older than {n} days"),
        "postgres-orders": ("autovacuum of orders: {n} pages", "connection {conn} idle for {n} minutes"),
        "redis-prices": ("client checkout-api-{conn} reconnected", "slowlog: MGET prices {ms} us"),
    },
    (
        ("stock-service", "Sort the warehouses by name"),
        ("gateway", "Write the country into the access log"),
        ("payment-adapter", "Count declines by bank"),
        ("checkout-api", "Translate two error messages"),
        ("stock-service", "Remove an unused endpoint"),
        ("gateway", "Update the client library"),
    ),
    (STOCK, PRICES, SECRET, DISK, GATEWAY, VOUCHER),
)
