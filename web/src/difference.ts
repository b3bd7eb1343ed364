// Two graphs side by side: what differs first, in words, and node by node.
import type { App, Panel } from "./app";
import { button, choice, el, fill, setOptions } from "./dom";
import { count, shortened, shortLists } from "./format";
import { type Change, changes } from "./lcs";
import { CALL, type GraphDocument, LINE, NAME, OP, TYPE } from "./types";

const CONTEXT = 3;
const PAGE = 300;

export class Differences implements Panel {
  readonly title = "Diff";
  readonly element: HTMLElement;
  private before: HTMLSelectElement;
  private after: HTMLSelectElement;
  private words = el("pre", { class: "why", "aria-label": "What differs first" });
  private counts = el("p", { role: "status" });
  private body = el("tbody");
  private more = button("Show more rows", () => this.grow());
  private rows: HTMLTableRowElement[] = [];
  private shown = PAGE;
  private seen = "";

  constructor(private app: App) {
    const [chooseBefore, before] = choice("Before", () => void this.compare());
    const [chooseAfter, after] = choice("After", () => void this.compare());
    this.before = before;
    this.after = after;
    const table = el("table", { class: "diff" },
      el("caption", {}, "Nodes that differ, with their neighbours"),
      el("thead", {}, el("tr", {}, ...["Change", "Node", "Type", "Line"].map((t) => el("th", { scope: "col" }, t)))),
      this.body,
    );
    this.element = el("div", { class: "stack" },
      el("h2", {}, "Difference of two graphs"),
      el("div", { class: "tools" }, chooseBefore, chooseAfter, button("Swap", () => this.swap())),
      this.counts, this.words, el("div", { class: "table" }, table, this.more),
    );
  }

  show(): void {
    const options = this.app.graphOptions();
    const fresh = !this.before.value && options.length > 0;
    setOptions(this.before, options);
    setOptions(this.after, options);
    if (fresh) {
      this.before.value = options[Math.max(0, options.length - 2)][0];
      this.after.value = options[options.length - 1][0];
    }
    void this.compare();
  }

  private swap(): void {
    [this.before.value, this.after.value] = [this.after.value, this.before.value];
    void this.compare();
  }

  private async compare(): Promise<void> {
    const a = Number(this.before.value), b = Number(this.after.value);
    if (!this.before.value || !this.after.value) return fill(this.counts, "No graph is known yet.");
    const key = `${a} ${b}`;
    if (key === this.seen) return;
    this.seen = key;
    const [one, other, words] = await Promise.all([this.app.graph(a), this.app.graph(b), this.app.source.difference(a, b)]);
    if (key !== this.seen) return;
    if (!one || !other) return fill(this.counts, "One of the graphs is no longer known.");
    const found = changes(keys(one), keys(other));
    const gone = found.filter((c) => c.kind === "-").length, come = found.filter((c) => c.kind === "+").length;
    fill(this.counts, `Nodes: ${count(come)} added, ${count(gone)} removed, ${count(found.length - come - gone)} the same.`);
    fill(this.words, a === b ? "They are one graph." : (words ?? "Choose the earlier graph as the first one to have it in words."));
    this.rows = hunks(found).map((change) => this.row(change, one, other));
    this.shown = PAGE;
    this.draw();
  }

  private grow(): void {
    this.shown *= 4;
    this.draw();
  }

  private draw(): void {
    fill(this.body, ...this.rows.slice(0, this.shown));
    this.more.hidden = this.rows.length <= this.shown;
  }

  private row(change: Change | null, one: GraphDocument, other: GraphDocument): HTMLTableRowElement {
    if (!change) return el("tr", { class: "gap" }, el("td", { colspan: 4 }, "⋯"));
    const [doc, node] = change.kind === "-" ? [one, change.a] : [other, change.b];
    const text = (field: number) => doc.texts[doc.nodes[node][field]];
    const words = { "+": "added", "-": "removed", "=": "same" }[change.kind];
    const call = shortened(`${shortened(text(NAME), 40)} = ${text(OP)}(${shortLists(text(CALL))})`, 240);
    return el("tr", { class: words },
      el("td", {}, `${change.kind === "=" ? "" : change.kind} ${words}`),
      el("td", {}, button(call, () => this.app.openNode(doc.number, node), `Show ${call}`)),
      el("td", { title: text(TYPE) }, shortened(text(TYPE), 120)), el("td", {}, el("code", {}, text(LINE))),
    );
  }
}

/** What makes two nodes alike: op, type and arguments, but for the numbers of values. */
function keys(doc: GraphDocument): string[] {
  const plain = doc.texts.map((text) => text.replace(/%\d+/g, "%"));
  return doc.nodes.map((row) => `${plain[row[OP]]}(${plain[row[CALL]]}):${plain[row[TYPE]]}`);
}

/** Changes with their neighbours; null where something was left out. */
function hunks(found: Change[]): (Change | null)[] {
  const near = new Uint8Array(found.length);
  found.forEach((change, i) => {
    if (change.kind !== "=") near.fill(1, Math.max(0, i - CONTEXT), i + CONTEXT + 1);
  });
  const shown: (Change | null)[] = [];
  found.forEach((change, i) => {
    if (near[i]) shown.push(change);
    else if (i === 0 || near[i - 1]) shown.push(null);
  });
  return shown.length === 1 && shown[0] === null ? [] : shown;
}
