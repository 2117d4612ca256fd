"use strict";

// Everything here adds to a page that can be read without it.

const root = document.documentElement;

{
  const button = document.getElementById("theme");
  const themes = ["auto", "light", "dark"];
  const show = (theme) => {
    if (theme === "auto") delete root.dataset.theme;
    else root.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
  };
  let stored = null;
  try { stored = localStorage.getItem("gputrain-theme"); } catch { /* a file may have no storage */ }
  let theme = themes.includes(stored) ? stored : "auto";
  show(theme);
  button.hidden = false;
  button.addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length];
    show(theme);
    try { localStorage.setItem("gputrain-theme", theme); } catch { /* then it lasts as long as the page */ }
  });
}

const table = document.getElementById("table");

if (table) {
  const body = table.tBodies[0];
  const headings = [...table.tHead.rows[0].cells];
  const valueOf = (row, column) => {
    const cell = row.cells[column];
    const value = cell.dataset.value ?? cell.textContent.trim();
    return value === "" || Number.isNaN(Number(value)) ? value : Number(value);
  };
  const compare = (one, other) => {
    if (typeof one === "number" && typeof other === "number") return one - other;
    return String(one).localeCompare(String(other), undefined, { numeric: true });
  };
  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const down = heading.getAttribute("aria-sort") === "ascending";
      for (const each of headings) each.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows].map((row) => [valueOf(row, column), row]);
      rows.sort(([one], [other]) => {
        if (one === "" || other === "") return (one === "") - (other === ""); // no figure is neither small nor large
        return down ? compare(other, one) : compare(one, other);
      });
      body.append(...rows.map(([, row]) => row));
    });
  });

  const form = document.getElementById("filters");
  const output = form.querySelector("output");
  const texts = new Map([...body.rows].map((row) => [row, row.textContent.toLowerCase()]));
  const apply = () => {
    const words = form.elements.text.value.toLowerCase().split(/\s+/).filter(Boolean);
    const selects = [...form.querySelectorAll("select")].filter((select) => select.value);
    let shown = 0;
    for (const row of body.rows) {
      const text = texts.get(row);
      row.hidden = !(
        words.every((word) => text.includes(word)) && selects.every((select) => row.dataset[select.name] === select.value)
      );
      shown += row.hidden ? 0 : 1;
    }
    output.textContent = `${shown} of ${texts.size} cases`;
  };
  form.hidden = false;
  form.addEventListener("input", apply);
  form.addEventListener("reset", () => setTimeout(apply)); // after the fields are empty
  form.addEventListener("submit", (event) => event.preventDefault());
  apply();
}

for (const chart of document.querySelectorAll(".chart[data-points]")) {
  const points = JSON.parse(chart.dataset.points);
  const drawing = chart.querySelector("svg");
  const { width, height } = drawing.viewBox.baseVal;
  const tip = document.createElement("output");
  const dot = document.createElement("span");
  tip.className = "tip";
  dot.className = "dot";
  let current = -1;
  const show = (index) => {
    current = Math.max(0, Math.min(points.length - 1, index));
    const [x, y, text] = points[current];
    tip.textContent = text;
    tip.className = x < width / 3 ? "tip left" : x > (2 * width) / 3 ? "tip right" : "tip";
    for (const element of [dot, tip]) {
      element.style.left = `${(100 * x) / width}%`;
      element.style.top = `${(100 * y) / height}%`;
    }
    chart.append(dot, tip);
  };
  const hide = () => {
    tip.remove();
    dot.remove();
  };
  chart.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const x = ((event.clientX - box.left) * width) / box.width;
    const y = ((event.clientY - box.top) * height) / box.height;
    let nearest = 0;
    let least = Infinity;
    points.forEach(([right, down], index) => {
      const distance = (right - x) ** 2 + (down - y) ** 2 / 16; // along the axis first
      if (distance < least) [nearest, least] = [index, distance];
    });
    show(nearest);
  });
  chart.addEventListener("pointerleave", hide);
  chart.addEventListener("blur", hide);
  chart.addEventListener("keydown", (event) => {
    const to = { ArrowLeft: current - 1, ArrowRight: current + 1, Home: 0, End: points.length - 1 }[event.key];
    if (event.key === "Escape") hide();
    if (to === undefined) return;
    event.preventDefault();
    show(current < 0 && event.key === "ArrowLeft" ? points.length - 1 : to);
  });
}

{
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")].filter((one) => !one.closest("#table"));
    for (const one of closed) one.open = true;
  });
  addEventListener("afterprint", () => {
    for (const one of closed) one.open = false;
  });
}
