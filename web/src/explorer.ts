// The explorer: search, outline, drawing and details of one graph.
import type { App, Panel } from "./app";
import { Details } from "./details";
import { button, choice, el, fill, setOptions } from "./dom";
import { Drawing } from "./drawing";
import { Folds, type Item, MOST_VISIBLE } from "./folds";
import { count } from "./format";
import { Tree } from "./tree";

const MOST_FOUND = 200;

export class Explorer implements Panel {
  readonly title = "Explorer";
  readonly element: HTMLElement;
  private folds: Folds | null = null;
  private known = new Map<number, Folds>();
  private selected: Item = 0;
  private drawn = false;
  private select: HTMLSelectElement;
  private tree = new Tree(() => this.folds, (item) => this.choose(item, false), (item) => this.toggle(item));
  private drawing = new Drawing((item) => this.choose(item, true), (item) => this.toggle(item));
  private details = new Details((item) => this.choose(item, false), (item) => this.toggle(item));
  private search = el("input", {
    type: "search", placeholder: "Search  ( / )", title: "op, line, shape, dtype, module or %name; several words: all of them", "aria-label": "Search nodes",
    oninput: () => this.find(), spellcheck: false, autocomplete: "off",
  });
  private found = el("ul", { class: "found", role: "listbox", "aria-label": "Search results", tabindex: -1 });
  private status = el("p", { class: "status", role: "status" });
  private matches: Item[] = [];

  constructor(private app: App) {
    const [chooser, select] = choice("Graph", (value) => {
      app.current = Number(value);
      void this.show();
    });
    this.select = select;
    const tools = el("div", { class: "tools", role: "toolbar", "aria-label": "Explorer" },
      chooser,
      button("Fold all", () => this.foldAll()),
      button("Unfold more", () => this.unfoldMore()),
      button("Fit", () => this.drawing.fit(), "Fit the drawing to its frame"),
      button("+", () => this.drawing.zoom(1.25), "Zoom in"),
      button("−", () => this.drawing.zoom(0.8), "Zoom out"),
      legend(),
    );
    const side = el("div", { class: "side" }, this.search, this.found, this.status, this.tree.element);
    this.element = el("div", { class: "explorer" },
      el("h2", { class: "hidden" }, "Explorer"), tools, side, this.drawing.element, this.details.element,
    );
    this.search.addEventListener("keydown", (event) => this.searchKey(event));
    this.found.addEventListener("keydown", (event) => this.foundKey(event));
    document.addEventListener("keydown", (event) => this.globalKey(event));
    new ResizeObserver(() => this.drawing.resize()).observe(this.drawing.element);
    this.details.show(null, 0);
  }

  async show(): Promise<void> {
    setOptions(this.select, this.app.graphOptions());
    const number = this.app.chosen();
    if (number < 0) return fill(this.status, "No graph is known yet.");
    this.select.value = String(number);
    if (this.folds?.doc.number === number && this.drawn) return;
    const doc = await this.app.graph(number);
    if (!doc) return fill(this.status, "This graph is no longer known.");
    if (number !== this.app.chosen()) return; // another one was chosen meanwhile
    let folds = this.known.get(number);
    if (!folds || folds.doc !== doc) this.known.set(number, (folds = new Folds(doc)));
    this.folds = folds;
    this.selected = 0;
    this.search.value = "";
    this.find();
    fill(this.status, `${doc.name}: ${count(doc.nodes.length)} nodes, ${count(doc.inputs.length)} inputs, ${count(doc.outputs.length)} results.`);
    this.redraw(false);
    performance.mark("explorer-drawn");
  }

  /** Show a node of the graph that is looked at, wherever it is folded away. */
  async open(graph: number, node: number): Promise<void> {
    this.app.current = graph;
    await this.show();
    if (this.folds) this.choose(this.folds.item(node), false);
  }

  private redraw(keepView: boolean): void {
    if (!this.folds) return;
    this.tree.draw(this.selected);
    this.drawing.draw(this.folds, this.selected, keepView);
    this.details.show(this.folds, this.selected);
    this.drawn = true;
  }

  private choose(item: Item, fromDrawing: boolean): void {
    const { folds } = this;
    if (!folds || item <= 0) return;
    this.selected = item;
    const hidden = folds.ancestors(item).some((group) => !folds.isOpen(group));
    if (hidden) {
      folds.reveal(item);
      this.redraw(false);
    } else {
      this.tree.draw(item);
      this.details.show(folds, item);
    }
    this.drawing.select(item, !fromDrawing);
  }

  private toggle(item: Item): void {
    const { folds } = this;
    if (!folds?.isGroup(item)) return;
    this.selected = item;
    if (folds.isOpen(item)) folds.fold(item);
    else if (!folds.unfold(item)) {
      fill(this.status, `No more than ${MOST_VISIBLE} items are drawn at once: fold something first.`);
    }
    this.redraw(true);
    this.drawing.select(item, false);
  }

  private foldAll(): void {
    this.folds?.foldAll();
    this.selected = 0;
    this.redraw(false);
  }

  private unfoldMore(): void {
    const many = this.folds?.unfoldMore();
    fill(this.status, many ? `${many} groups unfolded.` : "Nothing more can be unfolded at once.");
    this.redraw(false);
  }

  // -- search ----------------------------------------------------------------------------------

  private find(): void {
    const query = this.search.value;
    const { items, total } = this.folds?.search(query, MOST_FOUND) ?? { items: [], total: 0 };
    this.matches = items;
    this.found.hidden = !query.trim();
    const rows = items.map((item, i) => this.result(item, i));
    const more = total > items.length ? el("li", { class: "more" }, `and ${count(total - items.length)} more`) : null;
    fill(this.found, ...rows, more);
    if (query.trim()) fill(this.status, total ? `${count(total)} found` : "Nothing found");
  }

  private result(item: Item, i: number): HTMLElement {
    const { folds } = this;
    const node = folds!.isGroup(item) ? "" : ` #${folds!.node(item)}`;
    const made = el("li", { role: "option", tabindex: i === 0 ? 0 : -1, "aria-selected": "false", onclick: () => this.choose(item, false) },
      el("span", { class: "label" }, folds!.label(item) + node), el("span", { class: "note" }, folds!.note(item)),
    );
    return made;
  }

  private searchKey(event: KeyboardEvent): void {
    if (event.key === "Escape") {
      this.search.value = "";
      this.find();
      this.tree.focus();
    } else if (event.key === "Enter" && this.matches.length) this.choose(this.matches[0], false);
    else if (event.key === "ArrowDown") this.found.querySelector<HTMLElement>("[role=option]")?.focus();
    else return;
    event.preventDefault();
  }

  private foundKey(event: KeyboardEvent): void {
    const options = [...this.found.querySelectorAll<HTMLElement>("[role=option]")];
    const at = options.indexOf(document.activeElement as HTMLElement);
    if (event.key === "ArrowDown") options[at + 1]?.focus();
    else if (event.key === "ArrowUp") (options[at - 1] ?? this.search).focus();
    else if (event.key === "Enter" && at >= 0) this.choose(this.matches[at], false);
    else if (event.key === "Escape") this.search.focus();
    else return;
    event.preventDefault();
  }

  private globalKey(event: KeyboardEvent): void {
    const inField = (event.target as HTMLElement).matches?.("input, select, textarea");
    if (event.key !== "/" || inField || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    this.app.openPanel(this.title);
    this.search.focus();
  }
}

function legend(): HTMLElement {
  const entries = ["forward", "backward", "optimizer", "none"].map((phase) =>
    el("li", {}, el("span", { class: `swatch phase-${phase}` }), phase === "none" ? "outside of modules" : phase),
  );
  return el("ul", { class: "legend", "aria-label": "Colours" }, ...entries);
}
