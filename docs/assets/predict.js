/* Predict, then see: a question of a tutorial gets fields for an answer, and a button that opens what there is to see.
 *
 * docs/predict.py writes it: a `.predict` with the question, a list of choices or none, and a fold that begins with the
 * answer, in bold. Its `data-answer` says {choice: the place in the list}, or {numbers, within: by how much each may be
 * missed, between: the words around them}. Without JavaScript the choices and the fold are what there is.
 */
(() => {
  "use strict";
  const make = (tag, attributes = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  };
  const RIGHT = {mark: "right", say: "Yes."}, NEAR = {mark: "right", say: "Near enough."};
  const WRONG = {mark: "wrong", say: "Not quite."}, NOTHING = {mark: "", say: ""};

  /** "1,024" is a thousand and more; "0,135" is written so where a comma stands before decimals. */
  const plain = (text) => /^[1-9]\d{0,2}(,\d{3})+(\.\d+)?$/.test(text) ? text.replaceAll(",", "") : text.replace(",", ".");

  /** Beside what was given: whether it is right; nothing where nothing was. */
  const put = (mark, right) => {
    mark.className = right === null ? "" : right ? "right mark" : "wrong mark";
    mark.textContent = right === null ? "" : right ? "✓" : "✗";
  };

  /** A radio button for each item of the list, and what decides on the one chosen. */
  function choices(list, {choice}, name) {
    const asked = list.previousElementSibling;
    asked.id ||= `${name}-asked`;
    const buttons = [...list.children].map(() => make("input", {type: "radio", name}));
    const marks = buttons.map(() => make("span"));
    const labels = [...list.children].map((item, i) =>
      make("label", {}, buttons[i], make("span", {}, ...item.childNodes, " ", marks[i])));
    list.remove();
    const fields = make("fieldset", {"aria-describedby": asked.id}, make("legend", {}, "Your prediction"), ...labels);
    const judge = () => {
      const chosen = buttons.findIndex((button) => button.checked);
      marks.forEach((mark, i) => put(mark, i === chosen ? i === choice : null));
      return chosen < 0 ? NOTHING : chosen === choice ? RIGHT : WRONG;
    };
    return [fields, judge];
  }

  /** A field for each number of the answer, between its words, and what decides on the numbers given. */
  function numbers({numbers: right, within, between}) {
    const fields = right.map((_, i) => {
      const which = right.length > 1 ? `, number ${i + 1} of ${right.length}` : "";
      const words = `${between[i]} … ${between[i + 1]}`.replace(/\s+/g, " ").trim();
      return make("input", {type: "text", inputmode: "decimal", autocomplete: "off", size: "5",
        "aria-label": `Your prediction${which}: ${words}`});
    });
    const marks = right.map(() => make("span"));
    const words = right.flatMap((_, i) => [make("span", {class: "field"}, fields[i], marks[i]), between[i + 1]]);
    const judge = () => {
      const texts = fields.map((field) => plain(field.value.replace("%", "").trim()));
      const given = texts.some((text) => text);
      const isOdd = (text) => given && (!text || Number.isNaN(Number(text)));
      fields.forEach((field, i) => { field.setAttribute("aria-invalid", isOdd(texts[i])); put(marks[i], null); });
      if (!given) return NOTHING;
      const odd = texts.findIndex(isOdd);
      if (odd >= 0) return {field: fields[odd], mark: "wrong", say: "Here a number is missing, such as 4 or 2.5."};
      const off = texts.map((text, i) => Math.abs(Number(text) - right[i]));
      const near = off.map((by, i) => by < within[i] + 1e-9);
      near.forEach((is, i) => put(marks[i], is));
      return off.every((by) => by < 1e-9) ? RIGHT : near.every(Boolean) ? NEAR : WRONG;
    };
    return [make("p", {}, between[0], ...words), judge];
  }

  for (const [i, question] of [...document.querySelectorAll(".predict")].entries()) {
    const fold = question.querySelector("details.see");
    const answer = JSON.parse(fold.dataset.answer);
    const [fields, judge] = "choice" in answer ? choices(fold.previousElementSibling, answer, `predict-${i}`) : numbers(answer);
    const said = make("output");
    const form = make("form", {class: "ask"}, fields, make("div", {class: "verdict"}, make("button", {class: "md-button"}, "See"), said));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const {mark, say, field} = judge();
      said.className = mark;
      said.textContent = say; // what is right is said in the fold
      if (field) field.focus();
      else fold.open = true;
    });
    fold.querySelector("summary").hidden = true; // the button opens it
    fold.before(form);
  }
})();
