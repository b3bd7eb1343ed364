// Tables that can be sorted by any column and show a page of rows at a time.
import { button, el, fill } from "./dom";

export interface Column<Row> {
  title: string;
  /** What is shown. */
  cell: (row: Row) => string | Node;
  /** What is sorted by; without it the column cannot be. */
  key?: (row: Row) => number | string;
  number?: boolean;
}

const PAGE = 100;

export class Table<Row> {
  readonly element: HTMLElement;
  private rows: Row[] = [];
  private shown = PAGE;
  private by = -1;
  private down = true;
  private body = el("tbody");
  private heads: HTMLTableCellElement[];
  private more = button("Show more rows", () => {
    this.shown *= 4;
    this.draw();
  });

  constructor(
    caption: string,
    private columns: Column<Row>[],
    private describe: (row: Row, element: HTMLTableRowElement) => void = () => {},
  ) {
    this.heads = columns.map((column, i) => this.head(column, i));
    const table = el(
      "table",
      {},
      el("caption", {}, caption),
      el("thead", {}, el("tr", {}, ...this.heads)),
      this.body,
    );
    this.element = el("div", { class: "table" }, table, this.more);
  }

  set(rows: Row[]): void {
    this.rows = rows;
    this.draw();
  }

  private head(column: Column<Row>, i: number): HTMLTableCellElement {
    const kind = column.number ? "number" : "";
    const act = () => this.sort(i);
    const inside = column.key ? button(column.title, act) : column.title;
    return el("th", { scope: "col", class: kind }, inside);
  }

  private sort(i: number): void {
    this.down = this.by === i ? !this.down : true;
    this.by = i;
    this.draw();
  }

  private draw(): void {
    const key = this.by < 0 ? undefined : this.columns[this.by].key;
    const rows = key ? [...this.rows].sort((a, b) => compare(key(a), key(b))) : this.rows;
    if (key && this.down) rows.reverse();
    this.heads.forEach((head, i) => {
      if (i === this.by) head.setAttribute("aria-sort", this.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    fill(this.body, ...rows.slice(0, this.shown).map((row) => this.row(row)));
    this.more.hidden = rows.length <= this.shown;
  }

  private row(row: Row): HTMLTableRowElement {
    const cells = this.columns.map((column, i) =>
      el(i === 0 ? "th" : "td", {
        class: column.number ? "number" : "",
        ...(i === 0 ? { scope: "row" } : {}),
      }, column.cell(row)),
    );
    const made = el("tr", {}, ...cells);
    this.describe(row, made);
    return made;
  }
}

function compare(a: number | string, b: number | string): number {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b));
}
