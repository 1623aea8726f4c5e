"""The incident `checkout`: an index that stayed behind."""

from __future__ import annotations

from examples_text.incident_data import Deploy, Hypothesis, Incident, Logs, Look, Metric

CHECKOUT = Incident(
    "checkout",
    862,
    "PagerDuty: checkout-api error rate above 5 % for ten minutes. Support has four tickets from shops "
    "that say that paying takes forever and then fails. It started around 14:25, I think. Nothing is "
    "planned today. Where do we start?",
    "gateway -> checkout-api -> (payment-adapter, stock-service, Postgres orders); checkout-api also "
    "reads the price lists from Redis. checkout-api runs with 12 instances and a pool of 20 connections "
    "each.",
    Logs(
        "checkout-api",
        "error",
        (
            "POST /checkout req={id} failed after 3000 ms: timed out waiting for a connection from the pool",
            "POST /checkout req={id} shop={user} status=503 pool: size 20, in use 20, waiting {n}",
            "POST /checkout req={id} shop={user} status=503 after 3000 ms, retried once",
        ),
        lines=16,
        more=1480,
    ),
    Metric("checkout-api", "error_rate", "percent", 0.3, 11.5, 866),
    (
        Hypothesis(
            "A slow query holds the connections of the pool",
            "queries on the orders database that take seconds since 14:25, and a pool that is full of them",
            "a database whose slow query log is as empty as it was this morning",
            Logs(
                "postgres-orders",
                "warning",
                (
                    "duration: {ms} ms statement: SELECT * FROM order_lines WHERE order_ref = $1 (conn "
                    "{conn})",
                    "duration: {ms} ms statement: SELECT * FROM order_lines WHERE order_ref = $1 (conn "
                    "{conn})",
                    "process {user} still waiting for ShareLock on relation order_lines after {ms} ms",
                ),
                lines=14,
                more=610,
                low_ms=1900,
                high_ms=2990,
            ),
            Metric("postgres-orders", "rows_read_per_second", "thousand rows", 41, 2210, 865),
            "Both expectations are met. One statement, the lookup of order_lines by order_ref, takes two "
            "to three seconds each time, and the rows read per second have gone up about fiftyfold at "
            "14:25. Reading that much for single orders means that the table is scanned from end to end, "
            "so an index is missing or not used.",
            (
                Look(
                    "An index does not vanish by itself, so I look at what was deployed before 14:25.",
                    (
                        Deploy("13:02", "stock-service", "2.41.0", "Log the warehouse of a reservation"),
                        Deploy(
                            "14:18",
                            "checkout-api",
                            "5.12.0",
                            "Migration 0187: rename order_lines.order_id to order_ref, add it to the API",
                        ),
                        Deploy("14:40", "gateway", "config", "Raise the log level of /checkout to debug"),
                    ),
                    "Version 5.12.0 of checkout-api went out at 14:18 with a migration that replaces the "
                    "column order_id by order_ref. If it made a new column instead of renaming the old "
                    "one, the index has stayed behind on the old column. That is a mechanism, and the "
                    "canary could not see it, because it has few orders. I am about 90 % sure.",
                ),
                Look(
                    "I want to see whether one request spends its time there, so I look at checkout-api "
                    "itself.",
                    Logs(
                        "checkout-api",
                        "info",
                        (
                            "trace req={id} auth 4 ms, prices 6 ms, order_lines {ms} ms, stock 31 ms",
                            "trace req={id} auth 5 ms, prices 7 ms, order_lines {ms} ms, stock 28 ms",
                        ),
                        decisive="trace req={id} plan: Seq Scan on order_lines (rows=48211937)",
                        low_ms=1900,
                        high_ms=2990,
                    ),
                    "Authentication, prices and stock take milliseconds, order_lines takes all the rest. "
                    "And one trace has the plan: a sequential scan over 48 million rows with a filter on "
                    "order_ref. There is no index for that column. The cause is clear enough to act on.",
                ),
            ),
        ),
        Hypothesis(
            "The payment provider has become slow",
            "calls from payment-adapter to the provider that take seconds, and connections held meanwhile",
            "a payment-adapter that answers as fast as before",
            Logs(
                "payment-adapter",
                "info",
                (
                    "authorize req={id} provider=cardbridge status=200 in {ms} ms",
                    "capture req={id} provider=cardbridge status=200 in {ms} ms",
                    "authorize req={id} provider=cardbridge status=402 declined in {ms} ms",
                ),
                lines=14,
                more=320,
                low_ms=140,
                high_ms=390,
            ),
            Metric("payment-adapter", "requests_per_minute", "requests", 412, 96, 866),
            "The provider answers in 140 to 390 ms, which is what it always does, and declines are not "
            "unusual either. But payment-adapter gets a quarter of the requests it had before 14:26: the "
            "requests get stuck before they reach it. That contradicts the hypothesis.",
            (
                Look(
                    "Before I close it, one check of the tail: are there any provider errors at all?",
                    Logs(
                        "payment-adapter",
                        "warning",
                        (
                            "certificate of cardbridge expires in {n} days",
                            "webhook req={id} arrived twice, ignored",
                        ),
                        lines=6,
                    ),
                    "Nothing but routine: a reminder about a certificate and two duplicate webhooks. I "
                    "close this hypothesis. New evidence would be provider times above a second. What is "
                    "left is whatever happens in checkout-api before it pays, and that is the database.",
                ),
                Look(
                    "If requests get stuck earlier, the pool of checkout-api should be full. I look at it.",
                    Metric("checkout-api", "pool_connections_in_use", "connections of 240", 58, 239, 866),
                    "The pool is full since 14:26: 239 of 240 connections in use, up from 58, while "
                    "fewer payments are made. So connections are held by something that is not the "
                    "payment. I close this hypothesis and recommend the one about a slow query next.",
                ),
            ),
        ),
    ),
    (
        "Traffic has doubled: expect more requests at the gateway; ruled out if the gateway is flat.",
        "Redis is down: expect cache misses in checkout-api; ruled out if the hit rate is as before.",
    ),
    "Since 14:25 UTC about one checkout in nine fails with a timeout. The lookup of order lines reads "
    "the whole table, because the migration in checkout-api 5.12.0 (14:18) has left the new column "
    "without an index. Each lookup holds a connection for two to three seconds, and the pool is full. "
    "Now: roll checkout-api back to 5.11.x; the old column is still there, so nothing is lost. If that "
    "is not possible, create the index concurrently, which takes about ten minutes and loads the disk. "
    "Tomorrow: have the pipeline compare query plans on a copy of the real table.",
)
