// In use with its band, and the exact rate of allocation, over time.

import uPlot from "uplot";
import { axisTime, bytes, clock } from "./format.ts";
import { plotted, type Point } from "./history.ts";

export class Timeline {
  private plot: uPlot | null = null;
  private marks: [number, number] = [0, 0];

  constructor(private readonly box: HTMLElement, private readonly text: HTMLElement, private readonly onRange: (from: number, to: number) => void) {
    new ResizeObserver(() => this.plot?.setSize({ width: this.width(), height: 190 })).observe(box);
  }

  show(points: Point[], marks: [number, number]) {
    this.marks = marks;
    const data: uPlot.AlignedData = plotted(points);
    if (this.plot) this.plot.setData(data);
    else this.plot = new uPlot(this.options(), data, this.box);
    const last = points.at(-1), rate = points.findLast(point => point.rate !== null)?.rate;
    this.text.textContent = last
      ? `${points.length} points from ${clock(points[0].time_ms)} to ${clock(last.time_ms)}. In use at the end: ${bytes(last.inuse ?? 0)}. Allocated per second: ${bytes(rate ?? 0)}.`
      : "";
  }

  /** Draws again in other colours. */
  restyle() {
    this.plot?.destroy();
    this.plot = null;
  }

  private width(): number {
    return Math.max(200, this.box.clientWidth);
  }

  private options(): uPlot.Options {
    const style = getComputedStyle(document.documentElement), colour = (name: string) => style.getPropertyValue(name).trim();
    const dim = colour("--dim"), line = colour("--line"), accent = colour("--accent"), warn = colour("--warn");
    const number = (_: uPlot, value: number | null) => (value === null ? "–" : bytes(value));
    const axis = (scale: string, side: 1 | 3): uPlot.Axis => ({
      scale, side, size: 70, stroke: dim, grid: { show: side === 3, stroke: line, width: 1 }, ticks: { stroke: line },
      incrs: Array.from({ length: 60 }, (_, power) => 2 ** power), values: (_, all) => all.map(value => bytes(value)),
    });
    return {
      width: this.width(), height: 190,
      cursor: { drag: { x: true, y: false, setScale: false } },
      scales: { y: { range: (_, __, high) => [0, (high || 1) * 1.08] }, rate: { range: (_, __, high) => [0, (high || 1) * 1.08] } },
      axes: [{ stroke: dim, grid: { stroke: line, width: 1 }, ticks: { stroke: line }, values: (_, all, __, ___, step) => all.map(time => axisTime(time, step)) }, axis("y", 3), axis("rate", 1)],
      series: [
        { value: (_, value) => (value === null ? "–" : clock(value * 1000)) },
        { label: "high", stroke: "transparent", value: number }, { label: "low", stroke: "transparent", value: number },
        { label: "in use", stroke: accent, width: 2, value: number, points: { size: 5 } },
        { label: "allocated per second", scale: "rate", stroke: warn, width: 1, dash: [4, 3], value: number },
      ],
      bands: [{ series: [1, 2], fill: `color-mix(in srgb, ${accent} 22%, transparent)` }],
      hooks: {
        draw: [plot => this.drawMarks(plot, colour("--text"))],
        setSelect: [plot => {
          const { left, width } = plot.select;
          if (width < 4) return;
          const time = (x: number) => plot.posToVal(x, "x") * 1000;
          this.onRange(time(left), time(left + width));
          plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        }],
      },
    };
  }

  private drawMarks(plot: uPlot, colour: string) {
    const pen = plot.ctx, { top, height } = plot.bbox;
    pen.save();
    pen.strokeStyle = pen.fillStyle = colour;
    pen.lineWidth = devicePixelRatio;
    pen.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    this.marks.forEach((mark, i) => {
      if (!mark) return;
      const x = plot.valToPos(mark / 1000, "x", true);
      pen.beginPath();
      pen.moveTo(x, top);
      pen.lineTo(x, top + height);
      pen.stroke();
      pen.fillText(i ? "B" : "A", x + 3 * devicePixelRatio, top + 11 * devicePixelRatio);
    });
    pen.restore();
  }
}
