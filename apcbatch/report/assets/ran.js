// Ran: command, versions, machine and options of each process that ran.

function showRan(section, run) {
  const { processes, run_file: file } = run.ran;
  section.hidden = processes.length === 0 && file === null;
  if (section.hidden) return;
  fill(section,
    processes.map((process, at) => processDetails(process, at, processes.length)),
    file === null ? null : element("details", {}, element("summary", {}, "The run file beside the output"),
      foreign(JSON.stringify(file, null, 2), "pre", { tabindex: "0" })));
}

function processDetails(process, at, of) {
  const { machine } = process;
  const facts = [
    ["Command", foreign(process.command, "code", { "data-name": "command" })],
    ["Input", foreign(process.input)],
    ["Began", instant(process.begin)],
    ["apcbatch", plain(process.version)],
    ["Model", foreign(process.model)],
    ["Fingerprint", element("code", { "data-name": "fingerprint" }, plain(process.fingerprint))],
    ["Numbers", `${plain(process.dtype)} on ${plain(process.device)}`],
    ...Object.entries(machine ?? {}).map(([name, value]) => (value === null ? null
      : [MACHINE_WORDS[name] ?? capital(name), inUnit(value, name.endsWith("_bytes") ? "bytes" : "")])),
  ];
  const isChanged = ([, , origin]) => origin !== "default";
  const [changed, rest] = [process.options.filter(isChanged), process.options.filter((option) => !isChanged(option))];
  const table = (caption, options) => plainTable(caption, ["Option", "Value", "From"],
    options.map(([name, value, origin]) => [visible(name), plain(value), plain(origin)]));
  return element("article", { "data-process": at },
    of > 1 ? element("h3", {}, `Process ${at + 1} of ${of}`) : null,
    factList(facts, { class: "facts wideFacts" }),
    changed.length ? [element("h4", {}, "Options that were set"), table("Options that were set", changed)] : null,
    rest.length ? element("details", {}, element("summary", {}, `${counted(rest.length, "option")} at the default`),
      table("Options at the default", rest)) : null);
}

const MACHINE_WORDS = {
  cpu: "Processor", gpu: "GPU", memory_bytes: "Memory", torch: "PyTorch", instructions: "Instruction set",
};

panels.ran = showRan;
