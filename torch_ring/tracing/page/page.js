// SPDX-License-Identifier: Apache-2.0
// The colors of the charts follow the page's: light or dark, as the system says or the button. A click
// on an entry of the legend hides its bars or marks.
(() => {
  const root = document.documentElement;
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () =>
    root.dataset.scheme ? root.dataset.scheme === "dark" : system.matches;

  function color() {
    const style = getComputedStyle(root);
    const of = (name) => style.getPropertyValue(name).trim();
    const [soft, line] = [of("--soft"), of("--line")];
    for (const page of Bokeh.documents) {
      for (const model of page._all_models.values()) {
        const has = (name) => name in model.properties;
        if (model.type.endsWith("Axis")) {
          model.setv({
            axis_label_text_color: soft, major_label_text_color: soft, axis_line_color: line,
            major_tick_line_color: line, minor_tick_line_color: null,
            axis_label_text_font_style: "normal",
          });
        } else if (model.type === "Grid") {
          model.setv({ grid_line_color: line });
        } else if (has("outline_line_color")) {
          model.setv({ outline_line_color: null });
        }
      }
    }
  }

  document.getElementById("scheme").addEventListener("click", () => {
    root.dataset.scheme = isDark() ? "light" : "dark";
    color();
  });
  for (const entry of document.querySelectorAll(".legend button")) {
    entry.addEventListener("click", () => {
      const visible = entry.getAttribute("aria-pressed") === "false";
      entry.setAttribute("aria-pressed", visible);
      for (const model of Bokeh.documents[0]._all_models.values()) {
        if (model.tags.includes(entry.dataset.tag)) model.setv({ visible });
      }
    });
  }
  system.addEventListener("change", color);
  const wait = () => {
    if (window.Bokeh && Bokeh.documents.length > 0) {
      color();
      root.dataset.drawn = "yes";
    } else {
      setTimeout(wait, 20);
    }
  };
  wait();
})();
