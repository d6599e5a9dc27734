// visible tells whether an element is drawn. A heading that only a screen reader reads is not.
function visible(element) {
  const style = getComputedStyle(element);
  const box = element.getBoundingClientRect();
  return style.visibility === "visible" && style.clipPath === "none" && box.width > 0 && box.height > 0 &&
    (!element.parentElement || getComputedStyle(element.parentElement).display === "contents" || visible(element.parentElement));
}

// texts returns the elements that have text of their own.
function texts() {
  return [...document.body.querySelectorAll("*")].filter((element) => visible(element) &&
    [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.textContent.trim() !== "") &&
    !["OPTION", "TITLE", "SCRIPT", "STYLE", "NOSCRIPT"].includes(element.tagName));
}

// outside returns the elements that are wider than the page, or than what scrolls them.
function outside() {
  const page = document.documentElement;
  const wide = page.scrollWidth > page.clientWidth ? ["the page scrolls to " + page.scrollWidth] : [];
  return wide.concat(texts().filter((element) => {
    const box = element.getBoundingClientRect();
    return !element.closest(".scroll") && (box.right > page.clientWidth + 0.5 || box.left < -0.5);
  }).map((element) => element.outerHTML.slice(0, 200)));
}

// colour returns red, green, blue and alpha of a computed colour.
function colour(text) {
  const parts = text.match(/[\d.]+/g).map(Number);
  return parts.length === 3 ? [...parts, 1] : parts;
}

// background returns the colour behind an element.
function background(element) {
  for (let e = element; e; e = e.parentElement) {
    const found = colour(getComputedStyle(e).backgroundColor);
    if (found[3] === 1) return found;
  }
  return matchMedia("(prefers-color-scheme: dark)").matches ? [18, 18, 18, 1] : [255, 255, 255, 1];
}

// luminance and contrast are those of WCAG 2.
function luminance(rgb) {
  const [r, g, b] = rgb.slice(0, 3).map((c) => c / 255).map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function contrast(a, b) {
  const [light, dark] = [luminance(a), luminance(b)].sort((x, y) => y - x);
  return (light + 0.05) / (dark + 0.05);
}

// pale returns the texts that cannot be read well: WCAG 2 asks for a contrast of 4.5.
function pale() {
  return texts().filter((element) => {
    const style = getComputedStyle(element);
    const ink = element.namespaceURI.endsWith("svg") ? style.fill : style.color;
    const least = element.textContent.trim() === "■" ? 3 : 4.5; // a picture, not a text
    return contrast(colour(ink), background(element)) < least;
  }).map((element) => element.outerHTML.slice(0, 200));
}

// tiny returns the texts that are too small to read.
function tiny() {
  return texts().filter((element) => {
    const svg = element.namespaceURI.endsWith("svg");
    const scale = svg ? element.ownerSVGElement.getScreenCTM().d : 1;
    return scale * parseFloat(getComputedStyle(element).fontSize) < 10.5;
  }).map((element) => element.outerHTML.slice(0, 200));
}

// hiddenFocus says what is wrong with how the element with the focus looks.
function hiddenFocus() {
  const element = document.activeElement;
  const style = getComputedStyle(element);
  const box = element.getBoundingClientRect();
  if (style.outlineStyle === "none" || parseFloat(style.outlineWidth) < 2) return "no outline: " + element.outerHTML;
  if (contrast(colour(style.outlineColor), background(element.parentElement)) < 3) return "pale: " + style.outlineColor;
  if (box.top < 0 || box.bottom > innerHeight || box.left < 0 || box.right > innerWidth) return "outside: " + element.outerHTML;
  return "";
}
