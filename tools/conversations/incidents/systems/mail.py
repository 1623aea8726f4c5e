"""The system that sends mails: what can be wrong with it, save what the example's incident asks about."""

from __future__ import annotations

from conversations.incidents.systems.system import System, Trouble
from conversations.incidents.world import Level

DEPTH = Level("queue_depth", "jobs", (90, 420), (21000, 88000), gradual=True)
SENT = Level("mails_per_minute", "mails", (380, 720), (14, 90))
FAILED = Level("failed_share", "percent", (0.1, 0.6), (14.0, 62.0))

TEMPLATE = Trouble(
    "[A template is broken|One template cannot be rendered]",
    "[errors of template-service|failed renders in template-service]",
    "renders that all succeed",
    (
        "job {id} template-service: status=500, returned to the queue",
        "job {id} attempt {conn}: no body to send",
        "job {id} render failed after {ms} ms, trying again",
    ),
    FAILED,
    "[Some customers get no mail|Only some of the customers write], mostly for invoices.",
    "template-service",
    "error",
    (
        "render invoice/{user} lang=fr: partial tax-note not found",
        "render invoice/{user} lang=fr: partial tax-note not found",
        "render invoice/{user} failed after {ms} ms",
    ),
    "{n} % of the renders of invoice/fr fail, none of the others",
    ("image {id}.png could not be scaled", "client of render {id} went away"),
    Level("failed_renders_per_minute", "renders", (0, 2), (70, 310)),
    'Renders fail, <before> a minute at <till> and <after> at <from>. "<line>" says which ones. [The hypothesis '
    "holds.|Both expectations are met.]",
    "I look at which files template-service has loaded.",
    "template-service",
    "info",
    ("loaded invoice/en with {n} partials", "loaded confirmation/fr with {n} partials"),
    "loaded invoice/fr without tax-note, file is missing",
    'It says "<line>". The file was not delivered with the last version, so every French invoice fails. I am 95 % '
    "sure.",
    "template-service",
    "version",
    "[Tax note in the invoices|Move the tax note into a partial]",
    "template-service <version> moved the tax note into a file of its own at <guilty_at>, and the French one is "
    "missing. That is a mechanism: 90 %.",
    "French invoices cannot be rendered, because template-service <version> lacks a file",
    "roll template-service back to the version before <version>; the tax note is gone for a while",
    "render every template in the pipeline",
)
CONNECTIONS = Trouble(
    "postgres-customers has no connection left",
    "refused connections in postgres-customers",
    "[connections to spare|a third of the connections free]",
    (
        "job {id} address of customer {user} not read: too many clients",
        "job {id} waits for a connection since {ms} ms",
        "job {id} attempt {conn}: no address, returned to the queue",
    ),
    DEPTH,
    "[No mail has gone out for a while.|Customers miss their mails.]",
    "postgres-customers",
    "error",
    (
        "connection of mail-worker-{conn} refused: too many clients",
        "connection of mail-worker-{conn} refused: too many clients",
        "remaining slots are reserved, {n} refused",
    ),
    "{n} connections of newsletter-export idle in transaction",
    ("statement of user {user} canceled", "connection {conn} reset by the client"),
    Level("connections_used", "connections of 200", (104, 132), (189, 192)),
    "<after> of 200 connections are in use since <from>, up from <before>, and the workers are refused. Who holds "
    "them: "
    '"<line>".',
    "I look at what the idle connections have last asked.",
    "postgres-customers",
    "info",
    ("connection {conn} of order-service: SELECT, {ms} us", "connection {conn} of mail-worker: SELECT, {ms} us"),
    "newsletter-export: {n} cursors open, none read since {conn} minutes",
    'The export opens cursors and does not close them: "<line>". The workers find no place. The cause is clear enough '
    "to act on.",
    "newsletter-export",
    "version",
    "[Read customers in parallel|Export with cursors]",
    "newsletter-export <version> reads in parallel since <guilty_at>, which takes the connections that the workers "
    "need. 90 %.",
    "newsletter-export <version> holds the connections of postgres-customers, and the workers get no address",
    "stop newsletter-export; the newsletter comes a day later",
    "a limit of connections for each user",
)
POISON = Trouble(
    "[One job kills the workers|A job that no worker survives]",
    "[workers that restart again and again|restarts of mail-worker]",
    "[no restart today|workers that run since the morning]",
    (
        "worker {conn} started, {n} jobs returned to the queue",
        "job {id} attempt {n}: not acknowledged within 120 s",
        "worker {conn} lost its job {id} after {ms} ms",
    ),
    DEPTH,
    "[Mails come late and some come three times.|A few customers get the same mail again and again.]",
    "mail-worker",
    "error",
    (
        "worker {conn} killed: out of memory after {ms} ms",
        "worker {conn} killed: out of memory after {ms} ms",
        "{n} jobs in hand lost with worker {conn}",
    ),
    "job {id} has an attachment of {user} MB",
    ("job {id} address is not valid, dropped", "job {id} customer {user} has left"),
    Level("restarts_per_minute", "restarts", (0, 0), (12, 31)),
    "The workers restart <after> times a minute since <from>, before that never. The last line before a kill is "
    '"<line>". '
    "The job comes back each time.",
    "Where does such a job come from? I look at order-service.",
    "order-service",
    "info",
    ("confirmation of order {user} queued, {n} kB", "invoice of order {user} queued in {ms} us"),
    "invoice of order {user} queued with all receipts since 2019",
    'order-service says "<line>". One job that is too large goes from worker to worker. The mechanism is complete.',
    "order-service",
    "version",
    "[Attach receipts to the invoice|All receipts in one mail]",
    "Since <guilty_at> order-service <version> attaches receipts. A large one kills its worker and is delivered "
    "again. 85 %.",
    "one job with a huge attachment kills each worker that takes it and is then delivered again",
    "take that job out of the queue, then roll order-service back",
    "refuse jobs above 20 MB, and give up after five tries",
)
LISTED = Trouble(
    "[Other mail servers refuse us|Our address is on a block list]",
    "status 550 from many mail servers",
    "[mails that are accepted as ever|no more refusals than usual]",
    (
        "job {id} smtp relay-1: 550 refused, not sent",
        "job {id} smtp relay-2: 550 refused, not sent",
        "job {id} bounced after {ms} ms, customer {user} informed by letter",
    ),
    FAILED,
    "[Customers of two large mail providers get nothing.|It concerns big mail providers only.]",
    "smtp-relay-1",
    "warning",
    (
        "{id} to mx{conn}: 550 sender is listed",
        "{id} to mx{conn}: 550 sender is listed",
        "{id} to mx{conn}: 421 try again in {n} minutes",
    ),
    "our address is on list zen since {n} minutes",
    ("{id} to mx{conn}: 450 mailbox of {user} is full", "{id} to mx{conn}: certificate is self-signed"),
    Level("refused_per_minute", "mails", (1, 6), (140, 480)),
    "Other servers refuse <after> mails a minute since <from>, where <before> is usual. The reason is in the log: "
    '"<line>".',
    "Nobody is listed without a reason. I look at what we have sent.",
    "mail-worker",
    "info",
    ("job {id} smtp relay-1: 250 accepted in {ms} us", "job {id} confirmation to customer {user}"),
    "job {id} winback to customer {user}, who left in 2017",
    'There are lines like "<line>". Mails to people who left long ago bring complaints, and complaints a list. I am 80 '
    "% sure.",
    "campaign-service",
    "config",
    "[Win back customers of all years|Campaign to former customers]",
    "At <guilty_at> a campaign to former customers began. That brings complaints, which get an address listed. 80 %.",
    "large providers refuse our mails, because a campaign to former customers got us on a block list",
    "stop the campaign and ask for removal from the list, which takes hours",
    "send campaigns from an address of their own",
)
FLOOD = Trouble(
    "[order-service queues too many jobs|Far more jobs than orders]",
    "many more jobs from order-service",
    "[as many jobs as orders|a steady number of new jobs]",
    (
        "job {id} duplicate of {id}, sent all the same",
        "job {id} waited {ms} s in the queue",
        "queue is {user} jobs ahead of worker {conn}",
    ),
    DEPTH,
    "[Customers get five mails for an order.|Some mails come five times, others very late.]",
    "order-service",
    "info",
    (
        "order {user} saved, confirmation queued",
        "order {user} saved again, confirmation queued",
        "order {user} saved again, confirmation queued",
    ),
    "order {user} saved {n} times in a minute",
    ("order {user} saved, confirmation queued", "order {user} paid, invoice queued"),
    Level("jobs_queued_per_minute", "jobs", (210, 420), (3900, 8800)),
    'order-service queues <after> jobs a minute at <from>, up from <before>. "<line>" shows that they are not new '
    "orders. The hypothesis holds.",
    "What saves an order so often? I look at the details.",
    "order-service",
    "debug",
    ("order {user} hook total in {ms} us", "order {user} hook address in {ms} us"),
    "order {user} hook total saves the order, which calls hook total",
    'Here it is: "<line>". Each save queues a mail, and each hook saves once more. The cause is clear enough to act '
    "on.",
    "order-service",
    "version",
    "[Correct the total after saving|Hooks for the total]",
    "order-service <version> went out at <guilty_at> and corrects totals by saving again, and every save queues a "
    "mail. 90 %.",
    "order-service <version> queues a mail at each of many saves of an order",
    "roll order-service back to the version before <version>, then drop the duplicates from the queue",
    "queue a confirmation once for each order",
)
SINGLE = Trouble(
    "[The workers send one mail at a time|Too few sends at once]",
    "[idle workers with one send each|one open connection for a worker]",
    "as many connections as last week",
    (
        "job {id} waited {ms} s for its turn",
        "job {id} waited {ms} s for its turn",
        "worker {conn} has one job in hand, {n} wait",
    ),
    SENT,
    "[All mails come, but hours late.|Mails arrive late, none is lost.]",
    "mail-worker",
    "info",
    (
        "worker {conn} job {id} smtp relay-1: 250 accepted in {n} ms",
        "worker {conn} job {id} smtp relay-2: 250 accepted in {n} ms",
        "worker {conn} takes job {id}",
    ),
    "worker {conn} started with concurrency=1",
    ("worker {conn} job {id} smtp relay-1: 250 accepted in {n} ms", "worker {conn} takes jobs {id}, {id}, {id}"),
    Level("sends_per_minute", "sends", (900, 2400), (105, 140)),
    "Both relays answer in milliseconds, but there are <after> sends a minute since <from>, not <before>. One line "
    'tells: "<line>".',
    "Where does a worker get this number from?",
    "mail-worker",
    "debug",
    ("setting retries=4 from file", "setting batch={n} from environment"),
    "setting concurrency missing, default is 1",
    'It says "<line>". The setting was lost, and the default is 1. That is a mechanism, and I am 95 % sure.',
    "mail-worker",
    "config",
    "[Move settings into one file|Clean up old settings]",
    "At <guilty_at> the settings of mail-worker were moved. Its concurrency got lost, so it sends one mail at a time. "
    "95 %.",
    "each worker sends one mail at a time, because its setting was lost at <guilty_at>",
    "undo the change of the settings; the backlog then goes in an hour",
    "refuse to start without that setting",
)
MAIL = System(
    "mail-worker",
    "warning",
    "order-service -> queue -> mail-worker (<instances> instances) -> (template-service, Postgres customers, SMTP "
    "relay). A "
    "job is acknowledged after the relay has accepted the mail; without that it is delivered again after 120 seconds.",
    (5, 5, 5, 2),
    (
        "The queue failed over: expect a new leader; ruled out by the old one.",
        "A firewall drops mails: expect resets; ruled out by none.",
        "The clocks differ: expect an offset; ruled out by equal clocks.",
        "The workers swap: expect full memory; ruled out by free memory.",
    ),
    {
        "template-service": ("render {id} has an empty name, using Customer", "font {id} is embedded twice"),
        "postgres-customers": ("autovacuum of customers: {n} pages", "connection {conn} idle for {n} minutes"),
        "mail-worker": ("job {id} has no language, using en", "job {id} took {n} kB of memory"),
        "smtp-relay-1": (
            "{id} to mx{conn}: greylisted for {n} minutes",
            "{id} to mx{conn}: certificate is self-signed",
        ),
        "order-service": ("order {user} has no phone number", "order {user} uses an old voucher"),
    },
    (
        ("template-service", "Round corners for the buttons"),
        ("order-service", "Show the weight of an order"),
        ("mail-worker", "Count mails by language"),
        ("campaign-service", "Rename a report"),
        ("template-service", "New address in the imprint"),
        ("order-service", "Update the client library"),
    ),
    (TEMPLATE, CONNECTIONS, POISON, LISTED, FLOOD, SINGLE),
)
