// The colors of the charts follow the page's: light or dark, as the system says or the button.
(() => {
  const root = document.documentElement;
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () =>
    root.dataset.scheme ? root.dataset.scheme === "dark" : system.matches;

  function color() {
    const style = getComputedStyle(root);
    const of = (name) => style.getPropertyValue(name).trim();
    const [text, soft, line] = [of("--text"), of("--soft"), of("--line")];
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
        } else if (model.type === "Legend") {
          model.setv({
            background_fill_alpha: 0, border_line_alpha: 0, label_text_color: text,
            inactive_fill_alpha: 0.5, inactive_fill_color: line,
          });
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
