// Drafts: tokens verified several in a pass: where they came from, and what they saved.

const DRAFT_SOURCES = {
  recorded: "the answer that the input has for this turn",
  previous: "the answer of an earlier run",
  siblings: "other answers to the same prompt",
  history: "earlier prompts and answers of the run",
  lookup: "the request's own tokens",
  grammar: "the only token that the structure allows",
};

function showDrafts(section, run) {
  const { drafts } = run;
  section.hidden = !drafts;
  if (!drafts) return;
  const share = drafts.completion_tokens > 0 ? drafts.accepted / drafts.completion_tokens : null;
  fill(section,
    factList([
      ["Drafted", quantity("drafts.drafted", drafts.drafted, (value) => counted(value, "token")), ", ",
        quantity("drafts.accepted", drafts.accepted), " accepted"],
      share === null ? null : ["Of the tokens generated",
        quantity("accepted_share", share, percent), " are accepted drafts"],
      drafts.tokens_per_pass === null ? null : ["Tokens a pass",
        quantity("tokens_per_pass", drafts.tokens_per_pass, (value) => trimmed(value, 2))],
      drafts.saved_s === null ? null : savedFact(drafts),
    ]),
    drafts.sources.length ? draftTable(drafts.sources) : null,
    drafts.saved_s === null ? null : element("p", { class: "quiet" }, "The time without drafts is an estimate: the "
      + "new tokens of each pass with drafts, at the median time of passes without drafts for as many answers."));
}

function savedFact({ saved_s: saved, decode_s: spent }) {
  const words = saved < 0 ? "Decode time lost" : "Decode time saved";
  return [words, quantity("saved_s", Math.abs(saved), seconds), " (",
    quantity("decode_s", spent, seconds), ", without drafts ", quantity("without_s", saved + spent, seconds), ")"];
}

function draftTable(sources) {
  const all = Math.max(1, sources.reduce((sum, one) => sum + one.accepted, 0));
  const rows = sources.map((one) => [
    visible(one.source),
    grouped(one.drafted),
    metered(one.accepted / all, grouped(one.accepted), "accepted"),
    percent(one.accepted / one.drafted),
    percent(one.accepted / all),
    Object.hasOwn(DRAFT_SOURCES, one.source) ? DRAFT_SOURCES[one.source] : "",
  ]);
  const heads = ["Source", "Drafted", "Accepted", "Of those drafted", "Of all accepted", "What it is"];
  const ofRow = (at) => ({ "data-source": sources[at].source });
  return plainTable("Drafts by source", heads, rows, [1, 2, 3, 4], "drafts", ofRow);
}

panels.drafts = showDrafts;
