// The page: tabs, the theme, and news from a program that runs.
import "uplot/dist/uPlot.min.css";
import "./style.css";
import { App, type Panel } from "./app";
import { source } from "./data";
import { Differences } from "./difference";
import { el, fill } from "./dom";
import { Explorer } from "./explorer";
import { Graphs } from "./graphs";
import { MemoryPanel } from "./memory";
import { Passes } from "./passes";
import { installTheme } from "./theme";
import { Timeline } from "./timeline";

const POLL = 1000; // milliseconds between two questions to a program that runs

function byId(id: string): HTMLElement {
  return document.getElementById(id)!;
}

class Page {
  private app = new App(source());
  private explorer = new Explorer(this.app);
  private panels: Panel[] = [
    new Timeline(this.app), new Graphs(this.app), this.explorer, new Differences(this.app), new MemoryPanel(this.app), new Passes(this.app),
  ];
  private tabs = this.panels.map((panel, i) => this.tab(panel, i));
  private at = 0;

  constructor() {
    const main = byId("panels");
    this.panels.forEach((panel, i) => {
      main.append(el("section", { role: "tabpanel", id: `panel-${i}`, "aria-labelledby": `tab-${i}`, hidden: true }, panel.element));
    });
    byId("tabs").append(...this.tabs);
    byId("tabs").addEventListener("keydown", (event) => this.key(event));
    this.app.openPanel = (title) => this.open(this.panels.findIndex((panel) => panel.title === title));
    this.app.openNode = (graph, node) => {
      this.app.openPanel("Explorer");
      void this.explorer.open(graph, node);
    };
    installTheme(byId("theme") as HTMLButtonElement);
  }

  async start(): Promise<void> {
    await this.refresh();
    const wanted = this.panels.findIndex((panel) => `#${panel.title.toLowerCase()}` === location.hash);
    const { live, events } = this.app.summary;
    this.open(wanted >= 0 ? wanted : live || events.length ? 0 : 2);
    performance.mark("page-ready");
    if (this.app.chosen() >= 0) void this.app.graph(this.app.chosen()); // it will be asked for next
    if (this.app.summary.live) this.poll();
  }

  private async refresh(): Promise<boolean> {
    const summary = await this.app.source.summary(this.app.summary.state);
    if (summary) {
      this.app.summary = summary;
      document.title = `${summary.title} – torpor view`;
      const versions = ["torpor", "torch", "gpu"].filter((n) => summary.versions[n]).map((n) => `${n} ${summary.versions[n]}`);
      fill(byId("program"), el("b", {}, summary.title), ` ${versions.join(", ")}`);
      this.say(summary.live ? "live" : "recorded");
    }
    return summary !== null;
  }

  private say(state: string): void {
    const box = byId("state");
    if (box.dataset.state === state) return;
    box.dataset.state = state;
    fill(box, { live: "● live", recorded: "recorded", ended: "the program has ended" }[state] ?? state);
  }

  private poll(pause = POLL): void {
    setTimeout(async () => {
      try {
        if (!document.hidden && (await this.refresh())) await this.panels[this.at].show();
        this.say("live");
        this.poll();
      } catch {
        this.say("ended");
        this.poll(10 * POLL);
      }
    }, pause);
  }

  // -- tabs ------------------------------------------------------------------------------------

  private tab(panel: Panel, i: number): HTMLElement {
    return el("button", {
      type: "button", role: "tab", id: `tab-${i}`, "aria-controls": `panel-${i}`, "aria-selected": "false",
      tabindex: -1, onclick: () => this.open(i),
    }, panel.title);
  }

  private open(i: number): void {
    this.at = i;
    this.tabs.forEach((tab, k) => {
      tab.setAttribute("aria-selected", String(k === i));
      tab.tabIndex = k === i ? 0 : -1;
      byId(`panel-${k}`).hidden = k !== i;
    });
    history.replaceState(null, "", `#${this.panels[i].title.toLowerCase()}`);
    void this.panels[i].show();
  }

  private key(event: KeyboardEvent): void {
    const moves: Record<string, number> = { ArrowRight: this.at + 1, ArrowLeft: this.at - 1, Home: 0, End: this.tabs.length - 1 };
    if (!Object.hasOwn(moves, event.key)) return;
    event.preventDefault();
    this.open((moves[event.key] + this.tabs.length) % this.tabs.length);
    this.tabs[this.at].focus();
  }
}

void new Page().start();
