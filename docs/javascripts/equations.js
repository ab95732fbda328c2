// Typesets the equations that pymdownx.arithmatex has marked, with the copy of KaTeX beside this file.
document.addEventListener("DOMContentLoaded", () => {
  for (const element of document.querySelectorAll(".arithmatex")) {
    const text = element.textContent.trim();
    const source = text.replace(/^\\[([]/, "").replace(/\\[)\]]$/, "");
    katex.render(source, element, {displayMode: text.startsWith("\\["), throwOnError: false});
  }
});
