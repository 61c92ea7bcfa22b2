// Describes the token under the pointer, and outlines every token of its span.
const about = document.getElementById('about');

function point(event) {
  document.querySelectorAll('.lit').forEach(each => each.classList.remove('lit'));
  const token = event.target.closest('i[data-p]');
  if (!token) {
    about.textContent = '';
    return;
  }
  const data = token.dataset;
  const words = [data.p, 'id ' + data.i];
  if (data.w) words.push('token ' + data.w + ' of the window');
  if (data.n) words.push('stands for: ' + data.n);
  about.textContent = words.join(' \u00b7 ');
  const span = token.closest('[data-s]');
  if (span) {
    token.closest('article').querySelectorAll('[data-s="' + span.dataset.s + '"]')
      .forEach(each => each.classList.add('lit'));
  } else {
    token.classList.add('lit');
  }
}

document.addEventListener('mouseover', point);
document.addEventListener('click', point);
