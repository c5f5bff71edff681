// Applies a chosen colour scheme before the page is painted. Without a choice, the system's counts.
// Not a module: modules run after the page has been parsed.
try {
  const chosen = localStorage.getItem("remora.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage is blocked: the system's scheme counts.
}
