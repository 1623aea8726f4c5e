// Ran: command, versions, machine and options of each process that ran.

function showRan(section, run) {
  const { segments, run_file: file } = run.ran;
  section.hidden = segments.length === 0 && file === null;
  if (section.hidden) return;
  fill(section,
    segments.length === 0 ? element("p", { class: "absent" }, NO_TRACE) : null,
    segments.map((segment, at) => segmentDetails(segment, at, segments.length)),
    file === null ? null : element("details", {}, element("summary", {}, "The run file beside the output"),
      foreign(JSON.stringify(file, null, 2), "pre", { tabindex: "0" })));
}

function segmentDetails(segment, at, of) {
  const { machine } = segment;
  const facts = [
    ["Command", foreign(segment.program.map(shellWord).join(" "), "code", { "data-name": "program" })],
    ["Input", foreign(inputWords(segment.input))],
    ["Began", instant(segment.begin)],
    ["apcbatch", plain(segment.version)],
    ["Model", foreign(segment.model)],
    ["Fingerprint", element("code", { "data-name": "fingerprint" }, plain(segment.fingerprint))],
    ["Numbers", `${plain(segment.dtype)} on ${plain(segment.device)}`],
    ...Object.entries(machine ?? {}).map(([name, value]) => (value === null ? null
      : [MACHINE_WORDS[name] ?? capital(name), inUnit(value, name.endsWith("_bytes") ? "bytes" : "")])),
  ];
  const isChanged = ([, , origin]) => origin !== "default";
  const [changed, rest] = [segment.options.filter(isChanged), segment.options.filter((option) => !isChanged(option))];
  const table = (caption, options) => plainTable(caption, ["Option", "Value", "From"],
    options.map(([name, value, origin]) => [visible(name), plain(value), plain(origin)]));
  return element("article", { "data-segment": at },
    of > 1 ? element("h3", {}, `Segment ${at + 1} of ${of}`) : null,
    factList(facts, { class: "facts wideFacts" }),
    changed.length ? [element("h4", {}, "Options that were set"), table("Options that were set", changed)] : null,
    rest.length ? element("details", {}, element("summary", {}, `${counted(rest.length, "option")} at the default`),
      table("Options at the default", rest)) : null);
}

const MACHINE_WORDS = {
  cpu: "Processor", gpu: "GPU", memory_bytes: "Memory", torch: "PyTorch", instructions: "Instruction set",
};

function inputWords(input) {
  return Array.isArray(input) ? input.join(", ") : plain(input);
}

/** Quote a word for the shell. */
function shellWord(word) {
  return /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;
}

panels.ran = showRan;
