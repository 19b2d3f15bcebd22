// Facts about the text of a page, as JSON: size, colours, where it stands, what could hide it.
(() => {
  const canvas = document.createElement('canvas');
  canvas.width = canvas.height = 1;
  const pen = canvas.getContext('2d', { willReadFrequently: true });
  const memo = (make) => {
    const known = new Map();
    return (key) => {
      if (!known.has(key)) known.set(key, make(key));
      return known.get(key);
    };
  };
  const paint = memo((colours) => {
    pen.clearRect(0, 0, 1, 1);
    for (const colour of colours.split('|')) {
      pen.fillStyle = colour;
      pen.fillRect(0, 0, 1, 1);
    }
    return [...pen.getImageData(0, 0, 1, 1).data];
  });
  const layers = memo((element) => {
    const own = getComputedStyle(element).backgroundColor;
    const below = element.parentElement ? layers(element.parentElement) : 'Canvas';
    return own === 'rgba(0, 0, 0, 0)' ? below : `${below}|${own}`;
  });
  const hides = memo((element) => {
    if (!element || element === document.documentElement) return null;
    const style = getComputedStyle(element);
    const clips = style.overflowX !== 'visible' || style.overflowY !== 'visible';
    if (clips && !element.classList.contains('scroll')) return element.tagName;
    return hides(element.parentElement);
  });
  const box = (rect) => [rect.left, rect.top, rect.right, rect.bottom];
  const texts = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    if (!node.data.trim() || node.parentElement.closest('style')) continue;
    const parent = node.parentElement;
    if (!parent.checkVisibility()) continue;
    const style = getComputedStyle(parent);
    const svg = parent.closest('svg');
    const range = document.createRange();
    range.selectNodeContents(node);
    const scroll = parent.closest('.scroll');
    texts.push({
      text: node.data.trim().slice(0, 60),
      size: parseFloat(style.fontSize),
      colour: paint(svg ? style.fill : style.color),
      ground: paint(layers(svg || parent)),
      box: box(svg ? parent.getBoundingClientRect() : range.getBoundingClientRect()),
      svg: svg ? [...document.querySelectorAll('svg')].indexOf(svg) : null,
      frame: svg ? box(svg.getBoundingClientRect()) : null,
      scroll: scroll !== null,
      caption: parent.closest('caption') !== null,
      region: scroll ? box(scroll.getBoundingClientRect()) : null,
      hidden: svg ? null : hides(parent),
    });
  }
  return JSON.stringify(texts);
})()
