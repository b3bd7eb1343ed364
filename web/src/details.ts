// The panel beside the drawing: everything that is known of one node or one group.
import { button, el, fill } from "./dom";
import type { Folds, Item } from "./folds";
import { bytes, count, flops, shortOp } from "./format";
import { ALIVE, BYTES, CALL, FLOPS, LAST_USE, LINE, NAME, OP, SCOPE, TRAFFIC, TYPE } from "./types";

const MOST_LINKS = 40;
const CONTEXT = 4; // lines of code around the one that names the node
const MOST_SNIPPETS = 4;

export class Details {
  readonly element = el("aside", { class: "details", "aria-label": "Details", tabindex: -1 });

  constructor(
    private onSelect: (item: Item) => void,
    private onToggle: (item: Item) => void,
  ) {}

  show(folds: Folds | null, item: Item): void {
    if (!folds || item <= 0) {
      fill(this.element, el("h3", {}, "Details"), el("p", {}, "Choose a node or a group: in the outline, in the drawing, or by searching (press /)."));
    } else if (folds.isGroup(item)) this.group(folds, item);
    else this.node(folds, item);
  }

  // -- a node ----------------------------------------------------------------------------------

  private node(folds: Folds, item: Item): void {
    const node = folds.node(item), row = folds.doc.nodes[node];
    const text = (field: number) => folds.text(node, field);
    const type = text(TYPE);
    const last = row[LAST_USE];
    fill(
      this.element,
      el("h3", {}, text(OP)),
      facts([
        ["Result", text(NAME)],
        ["Shape", shapes(type)],
        ["Dtype", dtypes(type)],
        ["Type", type],
        ["Cost", `${flops(row[FLOPS])} operations, ${bytes(row[TRAFFIC])} read and written`],
        ["Memory", `${bytes(row[BYTES])} made, ${bytes(row[ALIVE])} alive at this moment`],
        ["Lives until", last < 0 ? "shares the memory of its operand" : this.lastUse(folds, last)],
        ["Source line", text(LINE) ? el("code", {}, text(LINE)) : "unknown"],
        ["Module", text(SCOPE) || "outside of modules"],
        ["Call", el("code", {}, `${text(OP)}(${text(CALL)})`)],
      ]),
      this.links(folds, "Takes", folds.doc.operands[node]),
      this.links(folds, "Is taken by", folds.users[node]),
      code(folds, node),
    );
  }

  private lastUse(folds: Folds, last: number): string | HTMLElement {
    if (last >= folds.doc.nodes.length) return "the end: it is a result of the graph";
    return this.link(folds, last);
  }

  private links(folds: Folds, title: string, sources: number[]): HTMLElement | null {
    const found = [...new Set(sources)];
    if (!found.length) return null;
    const shown = found.slice(0, MOST_LINKS).map((source) => el("li", {}, this.link(folds, source)));
    const rest = found.length - shown.length;
    return el("section", {},
      el("h4", {}, `${title} (${found.length})`),
      el("ul", { class: "links" }, ...shown, rest > 0 ? el("li", {}, `and ${rest} more`) : null),
    );
  }

  private link(folds: Folds, source: number): HTMLElement {
    if (source < 0) {
      const [name, type, origin] = folds.doc.inputs[-1 - source].map((i) => folds.doc.texts[i]);
      return el("span", {}, `${name} ${origin}: ${type}`);
    }
    const words = `${folds.text(source, NAME)} ${shortOp(folds.text(source, OP))}`;
    return button(words, () => this.onSelect(folds.item(source)));
  }

  // -- a group ---------------------------------------------------------------------------------

  private group(folds: Folds, item: Item): void {
    const total = folds.totals[item];
    const open = folds.isOpen(item);
    const kinds: Record<string, string> = {
      phase: "phase", module: "module", repeat: "equal parts", part: "one of equal parts",
      line: "nodes of one line", range: "neighbours",
    };
    fill(
      this.element,
      el("h3", {}, folds.label(item)),
      facts([
        ["Kind", kinds[folds.kind(item)] ?? folds.kind(item)],
        ["Nodes", count(total.nodes)],
        ["Cost", `${flops(total.flops)} operations, ${bytes(total.traffic)} read and written`],
        ["Memory", `${bytes(total.bytes)} made in all`],
      ]),
      button(open ? "Fold" : "Unfold", () => this.onToggle(item)),
      el("section", {}, el("h4", {}, "Ops"), ops(folds, item)),
      el("section", {}, el("h4", {}, "Lines"), lines(folds, item)),
    );
  }
}

function facts(rows: [string, string | Node][]): HTMLElement {
  return el("dl", {}, ...rows.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

function shapes(type: string): string {
  return [...type.matchAll(/\w+(\[[^\]]*\])/g)].map((m) => m[1]).join(", ") || "none";
}

function dtypes(type: string): string {
  const found = [...type.matchAll(/(\w+)\[[^\]]*\]/g)].map((m) => m[1]);
  return found.join(", ") || type;
}

function nodesIn(folds: Folds, item: Item): number[] {
  const found: number[] = [], stack = [item];
  while (stack.length) {
    const next = stack.pop()!;
    if (folds.isGroup(next)) stack.push(...folds.children[next]);
    else found.push(folds.node(next));
  }
  return found;
}

function tally(folds: Folds, item: Item, field: number): [string, number, number][] {
  const found = new Map<string, [number, number]>();
  for (const node of nodesIn(folds, item)) {
    const text = field === OP ? shortOp(folds.text(node, OP)) : folds.text(node, field);
    const [many, cost] = found.get(text) ?? [0, 0];
    found.set(text, [many + 1, cost + folds.doc.nodes[node][FLOPS]]);
  }
  const rows = [...found].map(([text, [many, cost]]): [string, number, number] => [text, many, cost]);
  return rows.sort((a, b) => b[2] - a[2] || b[1] - a[1]).slice(0, 12);
}

function ops(folds: Folds, item: Item): HTMLElement {
  const rows = tally(folds, item, OP).map(([op, many, cost]) => el("li", {}, `${op} × ${count(many)}, ${flops(cost)}`));
  return el("ul", { class: "links" }, ...rows);
}

function lines(folds: Folds, item: Item): HTMLElement {
  const rows = tally(folds, item, LINE).map(([line, many]) => el("li", {}, el("code", {}, line || "unknown"), ` × ${count(many)}`));
  return el("ul", { class: "links" }, ...rows);
}

// -- code ----------------------------------------------------------------------------------------

function code(folds: Folds, node: number): HTMLElement {
  const { code } = folds.doc;
  const section = el("section", {}, el("h4", {}, "Generated code"));
  if (!code) {
    section.append(el("p", {}, "There is none: the graph was not compiled, or the file was written without it."));
    return section;
  }
  const rows = code.split("\n");
  const found = naming(rows, folds.text(node, NAME).split(",")[0], folds.text(node, OP));
  if (found.length) section.append(...snippets(rows, found));
  else section.append(el("p", {}, "No line of it names this op: it was merged into others."));
  section.append(button(`All ${count(rows.length)} lines`, () => showAll(folds.doc.name, code, found[0] ?? 0)));
  return section;
}

/** Lines that name a node: its result and op where the code is the graph's text, else the op. */
function naming(rows: string[], name: string, op: string): number[] {
  const exact: number[] = [], loose: number[] = [];
  const [space, stem] = op.split(".");
  const words = [`${space}.${stem}`, `extern_kernels.${stem}(`];
  rows.forEach((row, i) => {
    if (!words.some((word) => row.includes(word))) return;
    loose.push(i);
    if (row.includes(op) && row.trimStart().startsWith(`${name} `)) exact.push(i);
    else if (row.includes(op) && row.trimStart().startsWith(`${name},`)) exact.push(i);
  });
  return exact.length ? exact : loose.slice(0, MOST_SNIPPETS);
}

function snippets(rows: string[], at: number[]): HTMLElement[] {
  return at.map((place) => {
    const from = Math.max(0, place - CONTEXT), to = Math.min(rows.length, place + CONTEXT + 1);
    const shown = rows.slice(from, to).map((row, i) =>
      el(from + i === place ? "mark" : "span", { class: "code-line" }, `${String(from + i + 1).padStart(5)}  ${row}\n`),
    );
    return el("pre", { tabindex: 0, "aria-label": `Generated code, line ${place + 1}` }, ...shown);
  });
}

function showAll(name: string, text: string, line: number): void {
  const body = el("pre", { tabindex: 0 }, text);
  const close = button("Close", () => box.close());
  const box: HTMLDialogElement = el("dialog", { class: "code", "aria-label": `Generated code of ${name}` },
    el("header", {}, el("h3", {}, `Generated code of ${name}`), close), body,
  );
  box.addEventListener("close", () => box.remove());
  document.body.append(box);
  box.showModal();
  body.scrollTop = Math.max(0, (line - 5) * (body.scrollHeight / text.split("\n").length));
}
