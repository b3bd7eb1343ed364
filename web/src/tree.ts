// The outline of a graph: the same groups as the drawing, for the keyboard and for screen readers.
import { el, fill } from "./dom";
import type { Folds, Item } from "./folds";

const MOST_ROWS = 400; // of one group's children; groups have far fewer

export class Tree {
  readonly element = el("ul", { role: "tree", "aria-label": "Outline of the graph", class: "tree" });
  private rows = new Map<Item, HTMLLIElement>();
  private selected: Item = -1;

  constructor(
    private folds: () => Folds | null,
    private onSelect: (item: Item) => void,
    private onToggle: (item: Item) => void,
  ) {
    this.element.addEventListener("keydown", (event) => this.key(event));
  }

  draw(selected: Item): void {
    const hadFocus = this.element.contains(document.activeElement);
    const folds = this.folds();
    this.rows.clear();
    fill(this.element);
    if (!folds) return;
    this.selected = selected;
    for (const child of folds.children[0].slice(0, MOST_ROWS)) this.element.append(this.row(folds, child, 1));
    const focused = this.rows.get(selected) ?? this.rows.values().next().value;
    if (focused) focused.tabIndex = 0;
    if (hadFocus) focused?.focus();
    this.rows.get(selected)?.querySelector(".row")?.scrollIntoView({ block: "nearest" });
  }

  focus(): void {
    (this.rows.get(this.selected) ?? this.rows.values().next().value)?.focus();
  }

  private row(folds: Folds, item: Item, level: number): HTMLLIElement {
    const group = folds.isGroup(item), open = group && folds.isOpen(item);
    const mark = el("span", { class: "mark", "aria-hidden": "true" }, group ? (open ? "▾" : "▸") : "·");
    const label = el("span", { class: "label" }, folds.label(item));
    const note = el("span", { class: "note" }, folds.note(item));
    const row = el("div", { class: "row" }, mark, label, note);
    const made = el("li", {
      role: "treeitem",
      class: group ? `group kind-${folds.kind(item)}` : "node",
      "aria-level": level,
      "aria-label": `${folds.label(item)}, ${folds.note(item)}`,
      "aria-selected": String(item === this.selected),
      tabindex: -1,
    }, row);
    made.dataset.item = String(item);
    if (group) made.setAttribute("aria-expanded", String(open));
    mark.addEventListener("click", () => group && this.onToggle(item));
    row.addEventListener("click", (event) => event.target !== mark && this.onSelect(item));
    row.addEventListener("dblclick", () => group && this.onToggle(item));
    this.rows.set(item, made);
    if (open) {
      const inside = folds.children[item].slice(0, MOST_ROWS).map((child) => this.row(folds, child, level + 1));
      made.append(el("ul", { role: "group" }, ...inside));
    }
    return made;
  }

  private key(event: KeyboardEvent): void {
    const folds = this.folds();
    const at = (event.target as HTMLElement).closest<HTMLElement>("[role=treeitem]");
    if (!folds || !at || event.ctrlKey || event.metaKey || event.altKey) return;
    const item = Number(at.dataset.item), items = [...this.rows.keys()];
    const go = (next: Item | undefined) => next !== undefined && next > 0 && this.onSelect(next);
    const acts = new Map<string, () => void>([
      ["ArrowDown", () => go(items[items.indexOf(item) + 1])],
      ["ArrowUp", () => go(items[items.indexOf(item) - 1])],
      ["Home", () => go(items[0])],
      ["End", () => go(items[items.length - 1])],
      ["ArrowRight", () => this.right(folds, item, go)],
      ["ArrowLeft", () => this.left(folds, item, go)],
      ["Enter", () => (folds.isGroup(item) ? this.onToggle(item) : this.onSelect(item))],
      [" ", () => this.onSelect(item)],
      ["Escape", () => go(folds.parent[item])],
    ]);
    const act = acts.get(event.key);
    if (act) {
      act();
      event.preventDefault();
      event.stopPropagation();
    }
  }

  private right(folds: Folds, item: Item, go: (item: Item) => unknown): void {
    if (!folds.isGroup(item)) return;
    if (folds.isOpen(item)) go(folds.children[item][0]);
    else this.onToggle(item);
  }

  private left(folds: Folds, item: Item, go: (item: Item) => unknown): void {
    if (folds.isGroup(item) && folds.isOpen(item)) this.onToggle(item);
    else go(folds.parent[item]);
  }
}
