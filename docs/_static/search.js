// Summaries of search results are made of the article alone, without its heading, the list of sections and the buttons.
if (typeof Search !== "undefined") {
  Search.htmlToText = (html, anchor) => {
    const page = new DOMParser().parseFromString(html, "text/html");
    const found = (anchor && page.querySelector(anchor)) || page.querySelector("article");
    found.querySelectorAll("h1, .headerlink, script, style").forEach((each) => each.remove());
    return found.textContent.replace(/\s+/g, " ");
  };
}
