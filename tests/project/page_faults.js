/* What a reader of the page in each frame stumbles over: data-words selects tables that have to fit. */
const frames = [...document.querySelectorAll("iframe")];
const out = [];
let left = frames.length;
function look(frame) {
  const page = frame.contentDocument, within = page.documentElement.clientWidth;
  for (const e of page.querySelectorAll("article *, #explorer *")) {
    const box = e.getBoundingClientRect(), name = e.tagName + ": " + e.textContent.slice(0, 40);
    const scrolls = e.closest(".table-wrapper, pre, .math, math");  // in a box of its own
    if (box.width && !scrolls && box.right > within + 1) out.push("beyond the page, " + name);
    if (e.matches("#explorer svg text, #explorer small, #explorer span, #explorer dt")) {
      const svg = e.closest("svg"), drawn = svg ? svg.getBoundingClientRect().width / svg.viewBox.baseVal.width : 1;
      const size = parseFloat(page.defaultView.getComputedStyle(e).fontSize) * drawn;
      if (box.width && size < 10.9) out.push("text of " + size + " pixels, " + name);
    }
    if (e.matches("#explorer dd code") && e.getBoundingClientRect().height > 30) out.push("wraps, " + name);
  }
  for (const table of page.querySelectorAll(frame.dataset.words))
    if (table.clientWidth < table.scrollWidth - 1) out.push("cut off, " + table.textContent.slice(0, 60));
  for (const group of page.querySelectorAll("#explorer .numbers, #explorer svg, #explorer .slider")) {
    const boxes = [...group.querySelectorAll("span, text, output")].map((e) => [e, e.getBoundingClientRect()]);
    boxes.forEach(([a, p], i) => boxes.slice(i + 1).forEach(([b, q]) => {
      const apart = p.right <= q.left + 1 || q.right <= p.left + 1 || p.bottom <= q.top + 3 || q.bottom <= p.top + 3;
      if (!apart) out.push("collide, " + a.textContent + " and " + b.textContent);
    }));
  }
  if (!--left) document.body.dataset.found = JSON.stringify(out);
}
for (const frame of frames)
  frame.onload = function wait() {
    const explorer = frame.contentDocument.querySelector("#explorer");
    if (explorer && explorer.hasAttribute("aria-busy")) setTimeout(wait, 200); else setTimeout(look, 300, frame);
  };
